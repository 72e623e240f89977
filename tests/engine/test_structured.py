"""Structured output through a real engine on a tiny random model: at temperature 2 it writes whatever it may."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.llm import LLM
from engine.outputs import QueueFull, RequestAtFault
from engine.sampling_params import BeamSearch, InvalidParameter, ReasoningMarks, SamplingParams, StructuredOutput
from tests.engine.harness import Generated, Harness
from tests.engine.preempting import load_preempting
from tests.tiny import tiny_folder

PROMPT = [10, 20, 30, 40]
SMALL = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
HOT = SamplingParams(max_tokens=200, temperature=2.0)
BOMB = StructuredOutput("lark", 'start: s\ns: s s s | s s | "a" | ""', "guided_grammar")


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(folder), dtype="float32", max_model_len=512),
        cache=CacheConfig(memory_bytes=64 << 20),
        scheduler=SchedulerConfig(max_num_seqs=32),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models"), "qwen2")


@pytest.fixture(scope="module")
def harness(folder: Path) -> Any:
    with Harness(config_of(folder)) as harness:
        yield harness


def schema(value: Any, param: str = "structured_outputs") -> StructuredOutput:
    return StructuredOutput("json", json.dumps(value), param)


def run(harness: Harness, params: SamplingParams, prompt: list[int] = PROMPT) -> list[Generated]:
    assert params.structured is not None
    harness.loop.run_until_complete(harness.engine.compile(params.structured))
    return list(harness.run([prompt], params).values())


def text_of(harness: Harness, got: Generated) -> str:
    return harness.engine.tokenizer.decode(got.token_ids)


@pytest.mark.parametrize("seed", range(6))
def test_json_is_of_its_schema(harness: Harness, seed: int) -> None:
    (got,) = run(harness, replace(HOT, structured=schema(SMALL), seed=seed))
    assert got.finish_reason == "stop", got.error
    value = json.loads(text_of(harness, got))
    assert set(value) == {"name", "n"}
    assert isinstance(value["n"], int)
    assert 0 <= value["n"] <= 999
    assert len(value["name"]) <= 8


@pytest.mark.parametrize(
    ("structured", "wanted"),
    [
        (StructuredOutput("regex", r"^\d{3}-[a-f]{2,4}$"), r"\d{3}-[a-f]{2,4}"),
        (StructuredOutput("regex", "a/b\\/c\n[é日\\/\\d]"), "a/b/c\n[é日/0-9]"),
        (StructuredOutput("regex", r"\D\w{3}\s\S[^\d\\]"), r"(?s)[^0-9][A-Za-z0-9_]{3}[ \t-\r][^ \t-\r][^0-9\\]"),
        (StructuredOutput("choice", '["yes", "no", "\\"é\\n日\\""]'), 'yes|no|"é\n日"'),
        (StructuredOutput("lark", 'start: "<" /[a-z]{1,5}/ ">" // a tag'), "<[a-z]{1,5}>"),
    ],
)
def test_every_kind_of_form(harness: Harness, structured: StructuredOutput, wanted: str) -> None:
    for seed in range(4):
        (got,) = run(harness, replace(HOT, structured=structured, seed=seed))
        assert got.finish_reason == "stop", got.error
        assert re.fullmatch(wanted, text_of(harness, got))


def test_json_object_is_an_object_or_cut(harness: Harness) -> None:
    ends = set()
    for seed in range(8):
        (got,) = run(harness, replace(HOT, structured=StructuredOutput("json_object"), seed=seed, max_tokens=100))
        ends.add(got.finish_reason)
        text = text_of(harness, got)
        assert text.startswith("{")
        assert got.finish_reason == "length" or isinstance(json.loads(text), dict)
    assert ends <= {"stop", "length"}


def test_too_few_tokens_end_with_length(harness: Harness) -> None:
    (got,) = run(harness, replace(HOT, structured=schema(SMALL), max_tokens=3))
    assert got.finish_reason == "length"
    assert len(got.token_ids) == 3


def test_a_text_of_exactly_max_tokens_is_complete(harness: Harness) -> None:
    """Every byte is a token here, and the end needs none."""
    (got,) = run(harness, replace(HOT, structured=StructuredOutput("choice", '["12345"]'), max_tokens=5))
    assert (text_of(harness, got), got.finish_reason) == ("12345", "stop")


def test_blanks_between_tokens_are_bounded(harness: Harness) -> None:
    """Blanks favoured beyond everything else: as many as are allowed, and no more."""
    blank = harness.engine.tokenizer.encode(" ", add_special_tokens=False)[0]
    params = replace(HOT, structured=schema(SMALL), logit_bias=((blank, 100.0),), max_tokens=400)
    (got,) = run(harness, params)
    assert got.finish_reason == "stop"
    outside = re.sub(r'"name": *"[^"]*"', '"name"', text_of(harness, got))
    runs = [len(found) for found in re.findall(r"\s+", outside)]
    assert max(runs) == 20
    assert not text_of(harness, got).endswith(" ")


def test_the_end_wins_over_ignore_eos_and_min_tokens(harness: Harness) -> None:
    structured = StructuredOutput("choice", '["yes", "no"]')
    for seed in range(4):
        (got,) = run(harness, replace(HOT, structured=structured, seed=seed, ignore_eos=True, min_tokens=50))
        assert text_of(harness, got) in ("yes", "no")
        assert got.finish_reason == "stop"


def test_a_text_that_may_go_on_ends_by_the_end_token_only(harness: Harness) -> None:
    """After each a there may be more or the end: ignore_eos and min_tokens keep the end away, as for any text."""
    structured = StructuredOutput("regex", "a{1,12}")
    eos = harness.engine.model_info.eos_token_ids[0]
    (got,) = run(harness, replace(HOT, structured=structured, logit_bias=((eos, 100.0),)))
    assert text_of(harness, got) == "a"
    assert (got.token_ids[-1], got.finish_reason) == (eos, "stop")
    (got,) = run(harness, replace(HOT, structured=structured, logit_bias=((eos, 100.0),), ignore_eos=True))
    assert (text_of(harness, got), got.finish_reason) == ("a" * 12, "stop")
    (got,) = run(harness, replace(HOT, structured=structured, logit_bias=((eos, 100.0),), min_tokens=5))
    assert (text_of(harness, got), got.finish_reason) == ("a" * 5, "stop")


def test_a_grammar_that_is_satisfied_by_nothing_ends_at_once(harness: Harness) -> None:
    (got,) = run(harness, replace(HOT, structured=StructuredOutput("lark", "start: "), ignore_eos=True))
    assert (text_of(harness, got), got.finish_reason) == ("", "stop")


def test_a_bias_against_all_that_may_follow_does_not_break_the_form(harness: Harness) -> None:
    structured = StructuredOutput("choice", '["yes", "no"]')
    ids = harness.engine.tokenizer.encode("yesno", add_special_tokens=False)
    params = replace(HOT, structured=structured, logit_bias=tuple((i, -100.0) for i in set(ids)))
    (got,) = run(harness, replace(params, repetition_penalty=2.0, frequency_penalty=2.0))
    assert text_of(harness, got) in ("yes", "no")


def test_stop_tokens_end_a_form_where_it_allows_them(harness: Harness) -> None:
    comma = harness.engine.tokenizer.encode(",", add_special_tokens=False)[0]
    structured = StructuredOutput("regex", "[a-c]{5},[a-c]{5}")
    (got,) = run(harness, replace(HOT, structured=structured, stop_token_ids=(comma,)))
    assert re.fullmatch("[a-c]{5},", text_of(harness, got))
    assert got.finish_reason == "stop"


def test_logprobs_are_the_models_own_and_finite(harness: Harness) -> None:
    """The first token's alternatives do not know of the mask; a forced token's logprob is what the model gave it."""
    free = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)
    (plain,) = harness.run([PROMPT], free).values()
    (got,) = run(harness, replace(HOT, structured=schema(SMALL), logprobs=5, seed=1))
    assert all(-1e4 < value <= 0 for value in got.logprobs)
    assert len(got.logprobs) == len(got.token_ids)
    assert plain.top_logprobs[0] == got.top_logprobs[0]
    assert got.top_logprobs[0].token_ids[0] == plain.token_ids[0]


def test_processed_logprobs_tell_of_the_mask(harness: Harness) -> None:
    """One token was allowed, so it was certain; nothing that is banned is reported."""
    structured = StructuredOutput("choice", '["yes"]')
    (got,) = run(harness, replace(HOT, structured=structured, logprobs=3, logprobs_mode="processed"))
    assert got.logprobs == [0.0, 0.0, 0.0]
    assert [top.token_ids for top in got.top_logprobs] == [(token_id,) for token_id in got.token_ids]


def test_choices_of_one_prompt_keep_their_own_place(harness: Harness) -> None:
    params = replace(HOT, structured=schema(SMALL), seed=7, n=6)
    together = run(harness, params)
    texts = [text_of(harness, got) for got in together]
    assert all(got.finish_reason == "stop" for got in together)
    assert len({json.loads(text)["name"] for text in texts}) > 1
    assert [text_of(harness, got) for got in run(harness, params)] == texts
    (alone,) = run(harness, replace(params, n=1))
    assert text_of(harness, alone) == texts[0]


def test_preemption_changes_nothing(folder: Path, harness: Harness) -> None:
    forms = [schema(SMALL), StructuredOutput("regex", "[a-z]{60}"), StructuredOutput("choice", '["a", "b"]')]
    params = [replace(HOT, structured=forms[i % 3], seed=i) for i in range(9)]
    prompts = [[10 + i, 20, 30] for i in range(9)]
    with Harness(config_of(folder), load_preempting) as preempting:
        texts = []
        for each in (harness, preempting):
            for form in forms:
                each.loop.run_until_complete(each.engine.compile(form))
            results = each.run_each(prompts, params)
            texts.append([(text_of(each, r[0, 0]), r[0, 0].finish_reason) for r in results])
        preempting.settle()
        assert max(stats.num_preemptions for stats in preempting.finished) >= 1
    assert texts[0] == texts[1]


def test_neighbours_of_a_grammar_row_are_untouched(harness: Harness) -> None:
    """Bit for bit, greedy and seeded, whether the row beside them is masked or not."""
    plain = [SamplingParams(max_tokens=24, temperature=float(i % 2), seed=i, logprobs=3) for i in range(5)]
    prompts = [[11 + i, 22, 33] for i in range(5)]
    alone = [harness.run([prompt], params)[0, 0] for prompt, params in zip(prompts, plain, strict=True)]
    harness.loop.run_until_complete(harness.engine.compile(schema(SMALL)))
    masked = [replace(HOT, structured=schema(SMALL), seed=i) for i in range(3)]
    mixed = harness.run_each([*prompts, *prompts[:3]], [*plain, *masked])
    assert [r[0, 0] for r in mixed[:5]] == [
        replace(a, num_cached_tokens=r[0, 0].num_cached_tokens) for a, r in zip(alone, mixed, strict=False)
    ]
    assert all(json.loads(text_of(harness, r[0, 0])) for r in mixed[5:])


def test_a_grammar_that_fails_at_run_time_fails_alone(harness: Harness) -> None:
    """Small and harmless when compiled, it has ever more readings as its text grows."""
    bomb = BOMB
    for form in (bomb, schema(SMALL)):
        harness.loop.run_until_complete(harness.engine.compile(form))
    before = [r[0, 0] for r in harness.run_each([[7, 8, 9]], [SamplingParams(max_tokens=60, seed=2)])]
    no_end = ((harness.engine.model_info.eos_token_ids[0], -100.0),)
    params = [
        replace(HOT, structured=form, seed=3, max_tokens=400, logit_bias=no_end) for form in (bomb, schema(SMALL))
    ]
    params.append(SamplingParams(max_tokens=60, seed=2))
    broken, fine, plain = harness.run_each([PROMPT, PROMPT, [7, 8, 9]], params)
    assert broken[0, 0].finish_reason == "error"
    assert broken[0, 0].error == "guided_grammar failed while its text was made: it is too complex."
    assert json.loads(text_of(harness, fine[0, 0]))
    assert plain[0, 0].token_ids == before[0].token_ids
    harness.settle()
    assert harness.loop.run_until_complete(harness.engine.compile(bomb)) is False  # its limits are shared: anew


def test_in_process_too_the_request_is_at_fault(folder: Path, harness: Harness) -> None:
    with LLM(str(folder), dtype="float32", max_model_len=512, memory_bytes=16 << 20) as llm:
        eos = harness.engine.model_info.eos_token_ids[0]
        params = replace(HOT, structured=BOMB, seed=3, max_tokens=400, logit_bias=((eos, -100.0),))
        with pytest.raises(RequestAtFault, match="too complex") as caught:
            llm.generate([PROMPT], params, use_tqdm=False)
    assert caught.value.param == "guided_grammar"


@pytest.mark.parametrize("options", [[f"option number {i}" for i in range(10_000)], ["yes", "yes no"] * 2000])
def test_any_number_of_choices(harness: Harness, options: list[str]) -> None:
    for seed in range(2):
        (got,) = run(harness, replace(HOT, structured=StructuredOutput("choice", json.dumps(options)), seed=seed))
        assert got.finish_reason == "stop", got.error
        assert text_of(harness, got).removesuffix("<|end|>") in options


# -- thinking -----------------------------------------------------------------------------------------------------


def ids_of(harness: Harness, text: str) -> list[int]:
    return harness.engine.tokenizer.encode(text, add_special_tokens=False)


def test_the_form_begins_when_the_thinking_ends(harness: Harness) -> None:
    """The prompt has opened the block; what is thought is free, and an end of text is no way out of it."""
    marks = ReasoningMarks("<t>", "]", opened=True)
    eos = harness.engine.model_info.eos_token_ids[0]
    bias = ((ids_of(harness, "]")[0], 3.0), (eos, 20.0))
    for seed in range(4):
        params = replace(HOT, structured=schema(SMALL), reasoning=marks, seed=seed, logit_bias=bias, max_tokens=400)
        (got,) = run(harness, params)
        thought, _, rest = text_of(harness, got).partition("]")
        assert thought
        assert got.finish_reason == "stop"
        assert set(json.loads(rest)) == {"name", "n"}


@pytest.mark.parametrize("bias", [100.0, -100.0])
def test_a_block_that_is_not_open_may_be_opened_or_not(harness: Harness, bias: float) -> None:
    marks = ReasoningMarks("<t>", "<", opened=False)
    biases = ((ids_of(harness, "<")[0], bias),)
    params = replace(HOT, structured=schema(SMALL), reasoning=marks, seed=1, max_tokens=400)
    (got,) = run(harness, replace(params, logit_bias=biases))
    text = text_of(harness, got)
    assert text.startswith("<t><" if bias > 0 else "{")
    assert got.finish_reason == "stop"
    assert set(json.loads(text.removeprefix("<t><"))) == {"name", "n"}


def test_thinking_survives_preemption_and_forks(folder: Path, harness: Harness) -> None:
    marks = ReasoningMarks("<t>", "]", opened=True)
    bias = ((ids_of(harness, "]")[0], 3.0),)
    params = replace(HOT, structured=schema(SMALL), reasoning=marks, seed=5, n=4, max_tokens=300, logit_bias=bias)
    with Harness(config_of(folder), load_preempting) as preempting:
        assert [g.token_ids for g in run(preempting, params)] == [g.token_ids for g in run(harness, params)]


# -- compiling ----------------------------------------------------------------------------------------------------


def refusal(harness: Harness, structured: StructuredOutput) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as caught:
        harness.loop.run_until_complete(harness.engine.compile(structured))
    return caught.value


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ({"type": "strange"}, "strange"),
        ({"type": "object", "properties": {"foo": "bar"}}, "schema"),
        ({"type": "object", "properties": [1]}, "properties"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"enum": 3}, "enum"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "pattern": "^+[a-z]$"}, "quantifier"),
        ({"type": "string", "pattern": "a|{2}b"}, "quantifier"),
        ({"type": "string", "pattern": "["}, "regular expression"),
        ({"type": "string", "pattern": "\\"}, "backslash"),
        ({"type": "object", "patternProperties": {"*": {}}}, "quantifier"),
        ({"$ref": "#"}, "nothing can match"),
        (False, "must be an object"),
    ],
)
def test_a_bad_schema_is_refused_with_its_field_and_reason(harness: Harness, value: Any, word: str) -> None:
    error = refusal(harness, schema(value, "response_format.json_schema.schema"))
    assert error.param == "response_format.json_schema.schema"
    assert word in str(error)
    assert "\n" not in str(error)
    assert len(str(error)) < 500


def test_a_refusal_names_the_field_of_each_asker(harness: Harness) -> None:
    assert refusal(harness, StructuredOutput("regex", "(", "guided_regex")).param == "guided_regex"
    assert (
        refusal(harness, StructuredOutput("regex", "(", "structured_outputs.regex")).param
        == "structured_outputs.regex"
    )


def test_a_grammar_is_compiled_once(harness: Harness) -> None:
    structured = StructuredOutput("regex", "once [0-9]+")
    compile_it = harness.engine.compile

    async def three_times() -> list[bool]:
        return list(await asyncio.gather(*(compile_it(structured) for _ in range(3))))

    assert harness.loop.run_until_complete(three_times()) == [False] * 3
    assert harness.loop.run_until_complete(compile_it(structured)) is True


def test_who_leaves_gives_up_its_place_in_the_queue(harness: Harness) -> None:
    """A hundred costly grammars whose askers have gone hold nobody up."""
    compile_it = harness.engine.compile

    async def leave() -> bool:
        costly = [schema({"type": "integer", "multipleOf": 99_991 + i}) for i in range(50)]
        asked = [asyncio.ensure_future(compile_it(each)) for each in costly]
        await asyncio.sleep(0.01)
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        assert not len(harness.engine._loaded.grammars._queue)
        return await compile_it(StructuredOutput("choice", '["yes", "no, after others have left"]'))

    assert harness.loop.run_until_complete(leave()) is False


def deep_schema(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        value = {"type": "object", "properties": {"a": value}, "required": ["a"]}
    return value


HOSTILE = {
    "too long": StructuredOutput("regex", "a" * (300 << 10)),
    "deep": schema(deep_schema(400)),
    "brackets": StructuredOutput("regex", "(" * 20_000),
    "brackets of a grammar": StructuredOutput("lark", "start: " + "(" * 50_000),
    "slow": schema({"type": "integer", "multipleOf": 999_983}),
    "exploding": StructuredOutput(
        "lark", "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(40)) + 'A40: "x"'
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_and_harms_nobody(harness: Harness, name: str) -> None:
    refusal(harness, HOSTILE[name])
    (got,) = run(harness, replace(HOT, structured=StructuredOutput("choice", json.dumps([name]))))
    assert text_of(harness, got) == name


def test_beam_search_has_no_form(harness: Harness) -> None:
    structured = StructuredOutput("choice", '["yes"]', "guided_choice")
    harness.loop.run_until_complete(harness.engine.compile(structured))
    with pytest.raises(InvalidParameter, match="beam") as caught:
        harness.run([PROMPT], SamplingParams(structured=structured, beam=BeamSearch(2)))
    assert caught.value.param == "guided_choice"


def test_in_process_and_with_a_stop_string(folder: Path) -> None:
    """The stop string ends the text, not the form: what stands before it is as the grammar wants it."""
    structured = StructuredOutput("regex", "[ab]{4}-[cd]{4}")
    with LLM(str(folder), dtype="float32", max_model_len=64, memory_bytes=8 << 20) as llm:
        ((whole, cut),) = llm.generate(
            [PROMPT], replace(HOT, structured=structured, n=2, seed=1, max_tokens=40), use_tqdm=False
        )
        ((stopped,),) = llm.generate(
            [PROMPT], replace(HOT, structured=structured, seed=1, stop=("-",), max_tokens=40), use_tqdm=False
        )
    assert re.fullmatch("[ab]{4}-[cd]{4}", whole.text)
    assert re.fullmatch("[ab]{4}-[cd]{4}", cut.text)
    assert (stopped.text, stopped.finish_reason) == (whole.text[:4], "stop")


def test_a_grammar_must_be_compiled_before_it_is_used(harness: Harness) -> None:
    with pytest.raises(QueueFull):
        harness.run([PROMPT], replace(HOT, structured=StructuredOutput("regex", "never compiled")))
