"""What a client gets: plain and streamed answers through HTTP and the OpenAI SDK, and errors in one shape."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.model

PROMPT = "The capital of France is"
GREEDY = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json=GREEDY | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text_of(http: httpx.Client, **body: Any) -> str:
    text: str = complete(http, **body)["choices"][0]["text"]
    return text


def streamed(http: httpx.Client, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream; it must end with [DONE]."""
    with http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        data = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(item) for item in data]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)


# -- completions --------------------------------------------------------------------------------------------------


def test_the_model_knows_the_capital_of_france(http: httpx.Client) -> None:
    answer = complete(http)
    choice = answer["choices"][0]
    assert "Paris" in choice["text"]
    assert choice["finish_reason"] in ("stop", "length")
    assert answer["object"] == "text_completion"
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["total_tokens"] == 5 + answer["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    "extra", [{}, {"n": 2}, {"stop": "."}, {"temperature": 1, "seed": 3}, {"logit_bias": {"28": -100}}]
)
def test_streamed_and_plain_are_one_text(http: httpx.Client, extra: dict[str, Any]) -> None:
    plain = complete(http, **extra)
    chunks = streamed(http, **(GREEDY | {"stream_options": {"include_usage": True}} | extra))
    assert chunks[-1]["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chunks[-1]["usage"][name] == plain["usage"][name]
    for choice in plain["choices"]:
        assert joined(chunks, choice["index"]) == choice["text"]
        ends = [c["finish_reason"] for k in chunks for c in k["choices"] if c["index"] == choice["index"]]
        assert [end for end in ends if end] == [choice["finish_reason"]]


def test_every_form_of_prompt(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    text = text_of(http)
    assert text_of(http, prompt=ids) == text
    several = complete(http, prompt=[PROMPT, "One, two, three,"], n=2)
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert several["choices"][0]["text"] == several["choices"][1]["text"] == text
    assert several["choices"][2]["text"] == text_of(http, prompt="One, two, three,")
    assert complete(http, prompt=[ids, ids])["choices"][1]["text"] == text


def test_stop_strings_never_leak(http: httpx.Client) -> None:
    text = text_of(http)
    stop = text[4:7]
    cut = complete(http, stop=stop)["choices"][0]
    assert cut["text"] == text[: text.index(stop)]
    assert cut["finish_reason"] == "stop"


def test_seeds_repeat_and_choices_differ(http: httpx.Client) -> None:
    body = {"temperature": 1.0, "seed": 11, "n": 3, "ignore_eos": True}
    first, again = (complete(http, **body)["choices"] for _ in range(2))
    assert [c["text"] for c in first] == [c["text"] for c in again]
    assert len({c["text"] for c in first}) == 3
    assert complete(http, **body | {"seed": 12})["choices"][0]["text"] != first[0]["text"]


def test_parameters_have_their_effect(http: httpx.Client) -> None:
    assert complete(http, max_tokens=3)["usage"]["completion_tokens"] == 3
    assert complete(http, max_tokens=100, ignore_eos=True)["usage"]["completion_tokens"] == 100
    assert text_of(http, top_k=1, temperature=2.0) == text_of(http)
    assert text_of(http, logit_bias={"100": 100}, max_tokens=3) != text_of(http, max_tokens=3)
    assert complete(http, prompt="x", max_tokens=40, min_tokens=40)["usage"]["completion_tokens"] == 40


def test_the_prefix_cache_is_told_and_salted(http: httpx.Client) -> None:
    prompt = [(7 * i) % 900 + 300 for i in range(200)]

    def cached(salt: str) -> int:
        usage = complete(http, prompt=prompt, max_tokens=1, cache_salt=salt)["usage"]
        number: int = usage["prompt_tokens_details"]["cached_tokens"]
        return number

    assert cached("mine") == 0
    assert 0 < cached("mine") < 200
    assert cached("theirs") == 0


# -- chat ---------------------------------------------------------------------------------------------------------

CHAT = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16, "temperature": 0}


def test_chat_streamed_and_plain(http: httpx.Client) -> None:
    plain = http.post("/v1/chat/completions", json=CHAT).json()
    message = plain["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert message["content"].strip()
    chunks = streamed(http, "/v1/chat/completions", **CHAT)
    assert joined(chunks) == message["content"]
    roles = [choice["delta"].get("role") for chunk in chunks for choice in chunk["choices"]]
    assert [role for role in roles if role] == ["assistant"]


def test_control_tokens_in_content_are_only_text(http: httpx.Client) -> None:
    def prompt_tokens(content: str) -> int:
        body = CHAT | {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        number: int = http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]
        return number

    assert prompt_tokens("a<|im_end|>b") > prompt_tokens("a b") + 2


# -- the SDK ------------------------------------------------------------------------------------------------------


def test_the_sdk_lists_completes_and_chats(sdk: openai.OpenAI) -> None:
    model = sdk.models.list().data[0]
    assert model.model_dump()["max_model_len"] == 2048
    assert sdk.models.retrieve(model.id).id == model.id
    done = sdk.completions.create(model=model.id, prompt=PROMPT, max_tokens=24, temperature=0)
    assert "Paris" in done.choices[0].text
    stream = sdk.completions.create(model=model.id, prompt=PROMPT, max_tokens=24, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == done.choices[0].text
    messages: list[Any] = CHAT["messages"]  # type: ignore[assignment]  # CHAT mixes value types
    chat = sdk.chat.completions.create(
        model=model.id, messages=messages, max_completion_tokens=16, temperature=0, extra_body={"top_k": 5}
    )
    pieces = sdk.chat.completions.create(
        model=model.id, messages=messages, max_tokens=16, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(pieces)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == chat.choices[0].message.content
    assert chunks[-1].usage == chat.usage or chunks[-1].usage is not None


def test_the_sdk_raises_its_own_errors(sdk: openai.OpenAI) -> None:
    model = sdk.models.list().data[0].id
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        sdk.completions.create(model="no/such-model", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        sdk.completions.create(model=model, prompt="x", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="2048"):
        sdk.completions.create(model=model, prompt=[1] * 3000)


# -- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", "/v1/completions", b'{"model": }', 400),
        ("POST", "/v1/completions", b'{"prompt": "x", "temperature": -1, "stream": true}', 400),
        ("POST", "/v1/completions", b'{"prompt": [999999]}', 400),
        ("POST", "/v1/completions", b'{"prompt": "x", "logit_bias": {"999999": 1}}', 400),
        ("POST", "/v1/chat/completions", b"[]", 400),
        ("POST", "/v1/completions", b'{"prompt": "x", "model": "other"}', 404),
        ("GET", "/v1/nothing", b"", 404),
        ("GET", "/v1/completions", b"", 405),
        ("POST", "/v1/completions", b"x" * (17 << 20), 413),
    ],
)  # fmt: skip
def test_errors(http: httpx.Client, method: str, path: str, content: bytes, status: int) -> None:
    response = http.request(method, path, content=content)
    assert response.status_code == status, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert text_of(http, max_tokens=2), "the server goes on"
