"""The gate before stop strings: what is thinking and what follows it, wherever the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling_params import ReasoningMarks
from engine.thinking import ThinkingGate

MARKS = ("<think>", "</think>")
pieces = st.lists(
    st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "think>", " \n", "a", "<", ">"]), max_size=12
)


def split(opened: bool, parts: list[str], marks: tuple[str, str] = MARKS) -> tuple[str, str]:
    gate = ThinkingGate(ReasoningMarks(*marks, opened=opened))
    fed = [gate.feed(part) for part in parts]
    return "".join(thinking for thinking, _ in fed), "".join(behind for _, behind in fed) + gate.finish()


@pytest.mark.parametrize(
    ("opened", "text", "thinking"),
    [
        (False, "plain <think>no</think> x", ""),
        (False, "<think>a</think>b</think>c", "<think>a</think>"),
        (False, " \n<think>a", " \n<think>a"),
        (False, " \n<thin", ""),
        (True, "a<think>b</think>c", "a<think>b</think>"),
        (True, "a</thin", "a</thin"),
        (True, "</think></think>", "</think>"),
        (True, "a</think>\n\nb\n", "a</think>\n\n"),
        (True, "</think>\n \n", "</think>\n"),
        (False, "\n\na", ""),
    ],
)
def test_the_end_mark_ends_the_thinking(opened: bool, text: str, thinking: str) -> None:
    for parts in ([text], list(text)):
        assert split(opened, parts) == (thinking, text[len(thinking) :])


@given(pieces, st.booleans())
def test_cuts_do_not_matter_and_nothing_is_lost(parts: list[str], opened: bool) -> None:
    text = "".join(parts)
    thinking, behind = split(opened, parts)
    assert (thinking, behind) == split(opened, list(text)) == split(opened, [text])
    assert thinking + behind == text


def test_without_a_start_mark_only_the_prompt_opens_the_thinking() -> None:
    assert split(False, ["ab", "</t>c"], ("", "</t>")) == ("", "ab</t>c")
    assert split(True, ["ab", "</t>c"], ("", "</t>")) == ("ab</t>", "c")


def test_blanks_wait_without_being_read_again() -> None:
    """A model that begins with nothing but blanks: what is looked at does not grow with them."""

    class Counted(str):
        def lstrip(self, chars: str | None = None) -> str:  # type: ignore[override]  # one way to call it
            seen.append(len(self))
            return super().lstrip(chars)

    seen: list[int] = []
    gate = ThinkingGate(ReasoningMarks(*MARKS, opened=False))
    assert all(gate.feed(Counted(" \n")) == ("", "") for _ in range(500))
    assert max(seen) == 2
    assert gate.feed("<think>a") == (" \n" * 500 + "<think>a", "")
