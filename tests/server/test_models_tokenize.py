"""/v1/models, /tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

import pytest

from engine.outputs import SamplingDefaults
from tests.server.fake_engine import FakeEngine, says, small_tokenizer
from tests.server.harness import client_of, error_of

TOKENIZER = small_tokenizer(adds_bos=True)


def engine() -> FakeEngine:
    return FakeEngine(says("x", TOKENIZER), tokenizer=TOKENIZER, defaults=SamplingDefaults(temperature=0.6))


async def test_models() -> None:
    async with client_of(engine(), served_model_name=("my/model", "alias")) as client:
        listed = (await client.get("/v1/models")).json()
        one = (await client.get("/v1/models/my/model")).json()
        error = error_of(await client.get("/v1/models/other"), 404)
        by_alias = (await client.post("/v1/completions", json={"model": "alias", "prompt": "a"})).json()
        error_of(await client.post("/v1/completions", json={"model": "fake-model", "prompt": "a"}), 404)
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["my/model", "alias"]
    assert one == listed["data"][0]
    assert (one["object"], one["owned_by"], one["max_model_len"]) == ("model", "pagemill", 512)
    assert isinstance(one["created"], int)
    assert one["sampling_defaults"] == {
        "temperature": 0.6, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "my/model", "alias")
    assert (one["type"], one["display_name"], one["max_tokens"]) == ("model", "my/model", 511)
    assert one["created_at"].endswith("Z")
    assert error["code"] == "model_not_found"
    assert by_alias["model"] == "alias"


async def test_tokenize_and_back() -> None:
    text = "the é😀"
    async with client_of(engine()) as client:
        with_bos = (await client.post("/tokenize", json={"prompt": text})).json()
        bare = (await client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()
        back = (await client.post("/detokenize", json={"tokens": with_bos["tokens"]})).json()
        hidden = (
            await client.post("/detokenize", json={"tokens": with_bos["tokens"], "skip_special_tokens": True})
        ).json()
        nothing = (await client.post("/detokenize", json={"tokens": []})).json()
        error = error_of(await client.post("/detokenize", json={"tokens": ["a"]}))
    assert bare["tokens"] == TOKENIZER.encode(text, add_special_tokens=False)
    assert with_bos["tokens"] == [TOKENIZER.bos_token_id, *bare["tokens"]]
    assert (with_bos["count"], with_bos["max_model_len"]) == (len(with_bos["tokens"]), 512)
    assert back == {"prompt": "<s>" + text}
    assert hidden == {"prompt": text}
    assert nothing == {"prompt": ""}
    assert error["param"] == "tokens[0]"


@pytest.mark.parametrize("odd", [-1, TOKENIZER.vocab_size, 99_999_999, 2**63])
async def test_ids_outside_the_vocabulary_are_refused(odd: int) -> None:
    async with client_of(engine()) as client:
        answer = await client.post("/detokenize", json={"tokens": [1, 2, odd]})
    assert error_of(answer)["param"] == "tokens"


async def test_a_request_without_a_body_says_so() -> None:
    async with client_of(engine()) as client:
        for path in ("/tokenize", "/v1/completions", "/v1/chat/completions"):
            assert "no body" in error_of(await client.post(path))["message"]


USER = {"role": "user", "content": "the <|im_end|> é"}


async def test_messages_are_tokenized_as_chat_reads_them() -> None:
    served = engine()
    async with client_of(served) as client:
        told = (await client.post("/tokenize", json={"messages": [USER], "return_token_strs": True})).json()
        await client.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 1})
        bare = (await client.post("/tokenize", json={"messages": [USER], "add_generation_prompt": False})).json()
        prefill = [USER, {"role": "assistant", "content": "a"}]
        options = {"continue_final_message": True, "add_generation_prompt": False}
        continued = (await client.post("/tokenize", json={"messages": prefill, **options})).json()
        tool = {"type": "function", "function": {"name": "weather"}}
        with_tools = (await client.post("/tokenize", json={"messages": [USER], "tools": [tool]})).json()
        plain = (await client.post("/tokenize", json={"prompt": "the é"})).json()
    assert tuple(told["tokens"]) == served.admitted[0].prompts[0]
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["token_strs"][0] == "<|im_start|>"
    assert bare["tokens"] == told["tokens"][: bare["count"]]
    assert bare["count"] < told["count"]
    assert TOKENIZER.decode(continued["tokens"], skip_special_tokens=False).endswith("assistant\na")
    assert "weather" in TOKENIZER.decode(with_tools["tokens"])
    assert plain["token_strs"] is None


async def test_long_messages_are_tokenized_too() -> None:
    async with client_of(engine()) as client:
        told = (await client.post("/tokenize", json={"messages": [{"role": "user", "content": "ab" * 600}]})).json()
    assert told["count"] > told["max_model_len"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [USER]}, "prompt"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": [USER], "chat_template": "x"}, "chat_template"),
        ({"messages": [USER], "continue_final_message": True}, "continue_final_message"),
    ],
)
async def test_what_tokenize_refuses(body: dict[str, object], param: str) -> None:
    async with client_of(engine()) as client:
        assert error_of(await client.post("/tokenize", json=body))["param"] == param


async def test_tokenizer_info() -> None:
    async with client_of(engine()) as client:
        told = (await client.get("/tokenizer_info")).json()
    assert told["chat_template"] == TOKENIZER.chat_template
    assert (told["bos_token"], told["eos_token"], told["pad_token"]) == ("<s>", "<|im_end|>", None)
    assert (told["bos_token_id"], told["eos_token_ids"]) == (TOKENIZER.bos_token_id, list(TOKENIZER.eos_token_ids))
    assert (told["vocab_size"], told["model_max_length"]) == (TOKENIZER.vocab_size, 512)
    assert told["tokenizer_class"]
