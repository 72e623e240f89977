"""Counting the tokens of thinking: any cut of the tokens gives the same count."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.sampling_params import ReasoningMarks
from server.reasoning import ReasoningCounter
from tests.server.fake_engine import small_tokenizer

TOKENIZER = small_tokenizer()
texts = st.lists(st.sampled_from(["<think>", "</think>", "<th", "ink>", " ", "\n", "a", "é😀"]), max_size=8).map(
    "".join
)


@given(text=texts, opened=st.booleans(), cuts=st.lists(st.integers(1, 4), min_size=1, max_size=9))
def test_the_count_is_that_of_the_whole_text(text: str, opened: bool, cuts: list[int]) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False, allow_special=False)
    counter = ReasoningCounter(TOKENIZER, ReasoningMarks("<think>", "</think>", opened))
    start = turn = 0
    while start < len(ids):
        end = start + cuts[turn % len(cuts)]
        counter.feed(ids[start:end])
        start, turn = end, turn + 1
    counter.finish()
    begun = opened or text.lstrip().startswith("<think>")
    after = 0 if opened else text.find("<think>") + len("<think>")
    end_at = text.find("</think>", after)
    thinking = (text if end_at < 0 else text[: end_at + len("</think>")]) if begun else ""
    done = 0
    for count in range(len(ids) + 1):
        if len(b"".join(TOKENIZER.token_bytes(i) for i in ids[:count])) >= len(thinking.encode()):
            done = count
            break
    assert counter.num_tokens == done


def test_without_a_start_mark_only_the_prompt_opens() -> None:
    ids = TOKENIZER.encode("a</x>b", add_special_tokens=False)
    for opened, wanted in ((True, 5), (False, 0)):
        counter = ReasoningCounter(TOKENIZER, ReasoningMarks("", "</x>", opened))
        counter.feed(ids)
        assert counter.num_tokens == wanted
