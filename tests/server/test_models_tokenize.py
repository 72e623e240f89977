"""/v1/models, /tokenize and /detokenize."""

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
