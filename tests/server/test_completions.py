"""/v1/completions over a fake engine: streamed and plain answers agree, wire fields reach the engine."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.outputs import SamplingDefaults
from server.protocol.logprobs import token_text
from tests.server.fake_engine import FakeEngine, Script, says, small_tokenizer
from tests.server.harness import client_of, error_of, stream

PATH = "/v1/completions"
TOKENIZER = small_tokenizer()


def babble(seed: int) -> Script:
    """Random tokens, other ones for each prompt and choice; any bytes, so also broken characters."""

    def script(prompt: Any, p: int, c: int) -> list[int]:
        dice = random.Random(f"{seed} {p} {c}")
        common = TOKENIZER.encode("the é😀 in ", add_special_tokens=False)
        return [dice.choice(common) if dice.random() < 0.7 else dice.randrange(270) for _ in range(40)]

    return script


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 3),
    prompts=st.lists(st.sampled_from(["one", "Two é", "the third"]), min_size=1, max_size=4),
    stop=st.sampled_from([None, "th", ["é", "😀"], ["e in", " "], ["nothing of the kind"]]),
    max_tokens=st.integers(0, 40),
    logprobs=st.sampled_from([None, 0, 2]),
    echo=st.booleans(),
)
async def test_stream_equals_plain(seed: int, echo: bool, logprobs: int | None, **fields: Any) -> None:
    body = {"prompt": fields["prompts"], **{k: fields[k] for k in ("n", "stop", "max_tokens")}}
    body |= {"logprobs": logprobs, "echo": echo, "return_token_ids": True}
    engine = FakeEngine(babble(seed), tokenizer=TOKENIZER, splits=random.Random(seed))
    async with client_of(engine) as client:
        plain = (await client.post(PATH, json=body)).json()
        events = await stream(client, PATH, body | {"stream_options": {"include_usage": True}})
    assert [choice["index"] for choice in plain["choices"]] == list(range(len(body["prompt"]) * body["n"]))
    for choice in plain["choices"]:
        index = choice["index"]
        assert events.text(index) == choice["text"]
        assert events.finish(index) == choice["finish_reason"]
        assert not echo or choice["text"].startswith(body["prompt"][index // body["n"]])
        streamed_ids = [t for c in events.choices(index) for t in c["token_ids"]]
        assert streamed_ids == choice["token_ids"]
        prompt_ids = [c["prompt_token_ids"] for c in events.choices(index) if "prompt_token_ids" in c]
        assert prompt_ids == [choice["prompt_token_ids"]] == [TOKENIZER.encode(body["prompt"][index // body["n"]])]
        if logprobs is not None:
            assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"]) + len(prompt_ids[0]) * echo
            for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                streamed = [item for c in events.choices(index) for item in c["logprobs"][key]]
                assert streamed == choice["logprobs"][key]
    assert events.usage == plain["usage"]
    assert events.chunks[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in events.chunks[:-1])
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in events.chunks}) == 1
    for chunk in events.chunks[:-1]:
        for choice in chunk["choices"]:
            assert choice["text"] or choice["finish_reason"] or choice["logprobs"]


async def test_plain_answer() -> None:
    engine = FakeEngine(says("Hello wörld", TOKENIZER), tokenizer=TOKENIZER)
    async with client_of(engine) as client:
        answer = (await client.post(PATH, json={"prompt": "Say", "max_tokens": 50})).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "fake-model"
    assert answer["system_fingerprint"] == "fp_fake"
    assert answer["choices"] == [{"index": 0, "text": "Hello wörld", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 13,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_a_stop_string_ends_the_sequence_in_the_engine() -> None:
    engine = FakeEngine(says("one. two. three.", TOKENIZER), tokenizer=TOKENIZER)
    async with client_of(engine) as client:
        body = {"prompt": "Say", "max_tokens": 50, "stop": ". t", "n": 2}
        answer = (await client.post(PATH, json=body)).json()
    assert [(c["text"], c["finish_reason"]) for c in answer["choices"]] == [("one", "stop")] * 2
    assert sorted(engine.finished) == [(0, 0), (0, 1)]
    assert answer["usage"]["completion_tokens"] == 2 * len("one. t")


async def test_fields_reach_the_engine() -> None:
    engine = FakeEngine(says("x", TOKENIZER), tokenizer=TOKENIZER)
    body = {
        "prompt": [[1, 2, 3], [4]],
        "n": 2,
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "seed": -(2**63),
        "stop": ["a", "bc"],
        "stop_token_ids": [5, 6],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "presence_penalty": -1,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": -100, "8": 2.5},
        "logprobs": 0,
        "skip_special_tokens": False,
        "cache_salt": "tenant",
        "user": "somebody",
        "best_of": 2,
        "no_such_field": {"a": [1]},
    }
    async with client_of(engine) as client:
        response = await client.post(PATH, json=body, headers={"X-Request-Id": "label-1"})
    assert response.status_code == 200
    admitted = engine.admitted[0]
    assert admitted.prompts == ((1, 2, 3), (4,))
    assert (admitted.cache_salt, admitted.label) == ("tenant", "label-1")
    params = admitted.params
    assert params.logit_bias == ((7, -100.0), (8, 2.5))
    assert (params.stop, params.stop_token_ids) == (("a", "bc"), (5, 6))
    for name in ("n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos",
                 "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "skip_special_tokens",
                 "include_stop_str_in_output"):  # fmt: skip
        assert getattr(params, name) == body[name], name


async def test_null_is_absent_and_the_models_defaults_fill_gaps() -> None:
    defaults = SamplingDefaults(temperature=0.7, top_k=64, repetition_penalty=1.2)
    engine = FakeEngine(says("x", TOKENIZER), tokenizer=TOKENIZER, defaults=defaults)
    names = ("n", "stop", "logprobs", "echo", "seed", "stream", "stream_options", "logit_bias", "best_of", "suffix",
             "temperature", "top_p", "max_tokens", "presence_penalty", "frequency_penalty", "stop_token_ids", "model",
             "top_k", "repetition_penalty")  # fmt: skip
    async with client_of(engine) as client:
        await client.post(PATH, json={"prompt": "a"} | dict.fromkeys(names))
        await client.post(PATH, json={"prompt": "a", "temperature": 0, "top_k": 0, "repetition_penalty": 1})
    absent, explicit = (admitted.params for admitted in engine.admitted)
    assert (absent.max_tokens, absent.n, absent.logprobs, absent.stop) == (16, 1, None, ())
    assert (absent.temperature, absent.top_p, absent.top_k, absent.repetition_penalty) == (0.7, 1.0, 64, 1.2)
    assert (explicit.temperature, explicit.top_k, explicit.repetition_penalty) == (0, 0, 1)


@pytest.mark.parametrize("prompt", ["the é", ["the é"], [[1, 2]], [1, 2], ["a", "b", "c"]])
async def test_forms_of_prompt(prompt: Any) -> None:
    engine = FakeEngine(says("x", TOKENIZER), tokenizer=TOKENIZER)
    async with client_of(engine) as client:
        answer = (await client.post(PATH, json={"prompt": prompt})).json()
    many = isinstance(prompt, list) and not isinstance(prompt[0], int)
    texts = prompt if many else [prompt]
    wanted = tuple(tuple(TOKENIZER.encode(t)) if isinstance(t, str) else tuple(t) for t in texts)
    assert engine.admitted[0].prompts == wanted
    assert answer["usage"]["prompt_tokens"] == sum(map(len, wanted))


async def test_raw_prompts_may_spell_control_tokens() -> None:
    engine = FakeEngine(says("x", TOKENIZER), tokenizer=TOKENIZER)
    async with client_of(engine) as client:
        await client.post(PATH, json={"prompt": "<|im_start|>a"})
    assert engine.admitted[0].prompts[0][0] == TOKENIZER.token_id("<|im_start|>")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1, 2], []]}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [None]}, "prompt"),
        ({"prompt": [[1, "a"]]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1.0]}, "prompt"),
        ({"prompt": [100000]}, "prompt"),
        ({"prompt": [[1], [-1]]}, "prompt[1]"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": "two"}, "n"),
        ({"n": True}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": False}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 9}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 10**30}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": [f"zq{i}" for i in range(10_000)]}, "stop"),
        ({"stop": "x" * (1 << 20)}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [2**63]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"logit_bias": {"hello": 5}}, "logit_bias"),
        ({"logit_bias": {"99999999": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"10": None}}, "logit_bias"),
        ({"logit_bias": {"10": "x"}}, "logit_bias"),
        ({"logit_bias": {"10": 101}}, "logit_bias"),
        ({"logit_bias": {"1.5": 1}}, "logit_bias"),
        ({"logit_bias": {"": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": [1, 2]}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(100_000)}}, "logit_bias"),
        ({"stream": "maybe"}, "stream"),
        ({"echo": "perhaps"}, "echo"),
        ({"model": 5}, "model"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": -2}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"suffix": "end", "echo": True}, "echo"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 1000}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"logprob_token_ids": [1] * 129, "logprobs": 0}, "logprob_token_ids"),
        ({"logprob_token_ids": [9999], "logprobs": 0}, "logprob_token_ids"),
        ({"logprob_token_ids": [1.5], "logprobs": 0}, "logprob_token_ids"),
        ({"logprobs_mode": "cooked", "logprobs": 0}, "logprobs_mode"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"include_usage": 5}, "stream": True}, "stream_options.include_usage"),
        ({"stream_options": [], "stream": True}, "stream_options"),
        ({"cache_salt": "x" * 300}, "cache_salt"),
        ({"temperature": -1, "stream": True}, "temperature"),
    ],
)
async def test_refused(fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine(says("x", TOKENIZER), tokenizer=TOKENIZER)
    async with client_of(engine) as client:
        error = error_of(await client.post(PATH, json={"prompt": "a"} | fields))
    assert error["param"] == param
    assert len(error["message"]) < 300
    assert error["type"] == "invalid_request_error"
    assert engine.admitted == []


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(512, 1), (511, 2), (8, 512), (500, None)])
async def test_context_length_is_named(num_prompt: int, max_tokens: int | None) -> None:
    engine = FakeEngine(says("x", TOKENIZER), tokenizer=TOKENIZER, max_model_len=512)
    async with client_of(engine) as client:
        body = {"prompt": [1] * num_prompt, "max_tokens": max_tokens}
        error = error_of(await client.post(PATH, json=body))
        assert error["code"] == "context_length_exceeded"
        assert "512" in error["message"]
        fits = await client.post(PATH, json={"prompt": [1] * 511, "max_tokens": 1})
        assert fits.status_code == 200


async def test_a_huge_text_is_refused_by_its_characters() -> None:
    engine = FakeEngine(says("x", TOKENIZER), tokenizer=TOKENIZER, max_model_len=64)
    async with client_of(engine) as client:
        error = error_of(await client.post(PATH, json={"prompt": "the " * 100_000}))
    assert error["code"] == "context_length_exceeded"
    assert "64" in error["message"]
    assert "400000 characters" in error["message"]


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("prompt", ["the é", [104, 3, 256]])
async def test_echo_with_logprobs(prompt: Any, max_tokens: int) -> None:
    engine = FakeEngine(says("xyz", TOKENIZER), tokenizer=TOKENIZER)
    async with client_of(engine) as client:
        body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": max_tokens}
        answer = (await client.post(PATH, json=body)).json()
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    text = prompt if isinstance(prompt, str) else TOKENIZER.decode(prompt)
    [choice] = answer["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == text + "xyz"[:max_tokens]
    assert choice["finish_reason"] == "length"
    assert logprobs["token_logprobs"] == [None, *(-float(i) for i in range(1, len(ids))), *[-0.5] * max_tokens]
    assert logprobs["top_logprobs"][0] is None
    assert all(len(top) == 3 for top in logprobs["top_logprobs"][1 : len(ids)])
    assert logprobs["tokens"][: len(ids)] == [token_text(TOKENIZER, token_id) for token_id in ids]
    assert logprobs["text_offset"][len(ids) :] == [len(text) + i for i in range(max_tokens)]
    assert logprobs["text_offset"][0] == 0
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert engine.admitted[0].params.prompt_logprobs == 2


async def test_offsets_count_from_the_start_of_the_prompt_as_it_was_sent() -> None:
    tokenizer = small_tokenizer(adds_bos=True)
    engine = FakeEngine(says("x", tokenizer), tokenizer=tokenizer)
    async with client_of(engine) as client:
        body = {"prompt": "a<|im_end|>b", "echo": True, "logprobs": 0, "max_tokens": 1}
        [choice] = (await client.post(PATH, json=body)).json()["choices"]
    assert choice["text"] == "a<|im_end|>bx"
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "<|im_end|>", "b", "x"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 11, 12]


async def test_prompt_logprobs_in_vllms_shape() -> None:
    engine = FakeEngine(says("x", TOKENIZER), tokenizer=TOKENIZER)
    async with client_of(engine) as client:
        body = {"prompt": [[70, 71, 72], [73]], "n": 2, "prompt_logprobs": 1, "max_tokens": 1}
        answer = (await client.post(PATH, json=body)).json()
    one, same, alone, _ = (choice["prompt_logprobs"] for choice in answer["choices"])
    assert one == same
    assert alone == [None]
    assert one[0] is None
    assert one[1] == {
        "71": {"logprob": -1.0, "rank": 1, "decoded_token": TOKENIZER.decode([71])},
        "70": {"logprob": -2.0, "rank": 1, "decoded_token": TOKENIZER.decode([70])},
    }
    assert set(one[2]) == {"71", "72"}
    assert all(choice["logprobs"] is None for choice in answer["choices"])


async def test_the_best_of_several_by_mean_logprob() -> None:
    engine = FakeEngine(lambda prompt, p, c: [TOKENIZER.encode("abcde")[c]] * (c + 1), tokenizer=TOKENIZER)
    engine.logprob_of = lambda choice: (-3.0, -1.0, -2.0, -1.0)[choice]
    async with client_of(engine) as client:
        body = {"prompt": ["1", "2"], "n": 2, "best_of": 4, "max_tokens": 9, "ignore_eos": True}
        answer = (await client.post(PATH, json=body)).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "bb"), (1, "dddd"), (2, "bb"), (3, "dddd")]
    assert answer["usage"]["completion_tokens"] == 2 * (1 + 2 + 3 + 4)


async def test_a_thousand_prompts_in_one_request() -> None:
    engine = FakeEngine(lambda prompt, p, c: [prompt[0]], tokenizer=TOKENIZER)
    async with client_of(engine) as client:
        body = {"prompt": [[i % 200, 1] for i in range(1024)], "max_tokens": 1, "echo": True, "logprobs": 0}
        answer = (await client.post(PATH, json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(1024))
    assert all(choice["logprobs"]["token_logprobs"] == [None, -1.0, -0.5] for choice in answer["choices"])


async def test_logprobs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.front.MAX_PROMPT_LOGPROBS", 50)
    engine = FakeEngine(says("x", TOKENIZER), tokenizer=TOKENIZER)
    async with client_of(engine, max_logprobs=100) as client:
        assert (await client.post(PATH, json={"prompt": "a", "logprobs": 100})).status_code == 200
        error_of(await client.post(PATH, json={"prompt": "a", "logprobs": 101}))
        body = {"prompt": [[1] * 5, [2] * 5], "echo": True, "logprobs": 4, "max_tokens": 0}
        assert (await client.post(PATH, json=body)).status_code == 200
        assert error_of(await client.post(PATH, json=body | {"n": 2}))["param"] == "logprobs"
        assert error_of(await client.post(PATH, json=body | {"prompt_logprobs": 5}))["param"] == "prompt_logprobs"


async def test_suffix_in_the_tokens_of_the_model() -> None:
    tokenizer = small_tokenizer(adds_bos=True, more_special=("<fim_prefix>", "<fim_suffix>", "<fim_middle>"))
    engine = FakeEngine(says("x", tokenizer), tokenizer=tokenizer)
    async with client_of(engine) as client:
        for prompt in ("a", [98]):
            assert (await client.post(PATH, json={"prompt": prompt, "suffix": "b"})).status_code == 200
    marks = [tokenizer.token_id(text) for text in ("<s>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>")]
    a, b = (tokenizer.encode(text, add_special_tokens=False)[0] for text in "ab")
    bos, before, after, middle = marks
    assert [admitted.prompts[0] for admitted in engine.admitted] == [
        (bos, before, each, after, b, middle) for each in (a, 98)
    ]
