from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.parsers.base import CallArguments, CallBegin
from server.parsers.formats import KINDS
from server.parsers.schema import Tools
from tests.server.parsers.cuts import TOOLS, Maker, every_cut, run, told, values
from tests.server.parsers.samples import SAMPLES, Calls

BY_NAME = {kind.name: kind for kind in KINDS}


def maker(name: str) -> Maker:
    return lambda: BY_NAME[name].make(Tools(TOOLS))


@pytest.mark.parametrize(("name", "text", "content", "calls"), SAMPLES)
def test_every_cut_means_the_same(name: str, text: str, content: str, calls: Calls) -> None:
    _, said, made = every_cut(maker(name), text)
    assert (said, values(made)) == (content, calls)


def test_every_format_has_samples_with_and_without_calls() -> None:
    assert {name for name, _, _, calls in SAMPLES if calls} | {"hermes"} == BY_NAME.keys()


@pytest.mark.parametrize(("name", "text", "content", "calls"), [sample for sample in SAMPLES if sample[3]])
def test_a_text_that_is_cut_short_keeps_what_came(name: str, text: str, content: str, calls: Calls) -> None:
    for end in range(len(text)):
        _, said, made = told(run(maker(name), [text[:end]]))
        assert [called for called, _ in made] == [called for called, _ in calls[: len(made)]]
        for (_, arguments), (_, whole) in zip(made[:-1], calls, strict=False):
            assert json.loads(arguments) == whole
        if not made and name != "harmony":  # its headers are nobody's text
            assert said.strip() == text[:end].strip() or content.startswith(said)


@pytest.mark.parametrize("name", sorted(BY_NAME))
@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_characters="<[{", exclude_categories=("Cs",))), seed=st.randoms())
def test_plain_text_stays_as_it_is(name: str, text: str, seed: object) -> None:
    parser = maker(name)
    assert told(run(parser, text)) == told(run(parser, [text])) == ("", text, [])


def marks_and_pieces(name: str) -> st.SearchStrategy[list[str]]:
    pieces = [
        *BY_NAME[name].marks, "{", "}", "[", "]", '"', "'", "\\", ":", ",", "(", ")", "=", "\n", " ",
        "now", "get_weather",
        '{"name": "now", "arguments": ', '"city"', "1", "true", "call:", "x", "é", "\ud7ff", '">', ">", "function",
    ]  # fmt: skip
    return st.lists(st.sampled_from(pieces) | st.text(max_size=3), max_size=25)


@pytest.mark.parametrize("name", sorted(BY_NAME))
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_text_raises_and_no_cut_matters(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(marks_and_pieces(name))).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    whole = told(run(maker(name), [text]))
    assert told(run(maker(name), text)) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    assert told(run(maker(name), [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])) == whole


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, text, _, calls in SAMPLES if len(calls) > 1])
def test_ids_differ_and_come_with_the_name(name: str, text: str) -> None:
    parts = run(maker(name), text)
    begun = [part for part in parts if isinstance(part, CallBegin)]
    assert len({part.id for part in begun}) == len(begun) > 1
    if name == "kimi_k2":
        assert [part.id for part in begun] == ["functions.get_weather:0", "functions.now:1"]
    elif name == "mistral":
        assert all(len(part.id) == 9 and part.id.isalnum() for part in begun)
    else:
        assert all(part.id.startswith("call_") for part in begun)


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "minimax_m2", "seed_oss", "gemma4", "mistral", "kimi_k2"])
def test_strings_stream_while_they_come(name: str) -> None:
    text = next(text for each, text, _, calls in SAMPLES if each == name and calls)
    parser = maker(name)()
    at = text.index("Köln")
    parser.feed(text[:at])
    assert any(isinstance(part, CallArguments) and "Köl" in part.text for part in parser.feed("Köln"))
