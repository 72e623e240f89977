"""`pagemill chat` against a server that is a function."""

from __future__ import annotations

import io
import json
from typing import Any

import httpx
import pytest

from server import chat_client
from server.chat_client import ChatError, Conversation, Options, run


def event(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n"


class FakeServer:
    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.answer = event("Hel") + event("lo") + "data: [DONE]\n\n"
        self.status = 200

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "first"}]})
        self.bodies.append(json.loads(request.content))
        if self.status != 200:
            return httpx.Response(self.status, json={"error": {"message": "too busy"}})
        return httpx.Response(200, text=self.answer)

    def client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.MockTransport(self), base_url="http://test")


def test_the_conversation_grows_by_question_and_answer() -> None:
    server = FakeServer()
    talk = Conversation(Options("http://test", system="Be brief.", temperature=0.5, max_tokens=9), server.client())
    assert "".join(talk.ask("Hi")) == "Hello"
    assert "".join(talk.ask("Again")) == "Hello"
    last = server.bodies[-1]
    assert [m["content"] for m in last["messages"]] == ["Be brief.", "Hi", "Hello", "Again"]
    assert (last["model"], last["stream"], last["temperature"], last["max_completion_tokens"]) == (
        "first",
        True,
        0.5,
        9,
    )
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "Be brief."}]


def test_a_question_without_an_answer_is_forgotten() -> None:
    server = FakeServer()
    talk = Conversation(Options("http://test"), server.client())
    server.status = 503
    with pytest.raises(ChatError, match="too busy"):
        list(talk.ask("Hi"))
    assert talk.messages == []


def test_an_error_in_mid_stream_keeps_what_came() -> None:
    server = FakeServer()
    server.answer = event("Hel") + 'data: {"error": {"message": "gone"}}\n\n'
    talk = Conversation(Options("http://test"), server.client())
    with pytest.raises(ChatError, match="gone"):
        list(talk.ask("Hi"))
    assert talk.messages[-1] == {"role": "assistant", "content": "Hel"}


def test_the_terminal_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    client = server.client()
    monkeypatch.setattr(chat_client.httpx, "Client", lambda **_: client)
    out = io.StringIO()
    assert run(Options("http://test"), io.StringIO("Hi\n\n/reset\nAgain\n/quit\nnever\n"), out) == 0
    assert out.getvalue().count("Hello") == 2
    assert [len(body["messages"]) for body in server.bodies] == [1, 1]


@pytest.mark.parametrize("url", ["http://[::1", "http://x:y", f"http://{'a' * 300}/", "ftp://x", "x"])
def test_an_odd_address_is_one_sentence(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Options(url, api_key="é"), io.StringIO(""), io.StringIO()) == 1
    told = capsys.readouterr().err
    assert told.startswith("pagemill: ")
    assert url in told
    assert not told.endswith("..\n")


@pytest.mark.parametrize("answer", ["<html>", "[]", '{"data": []}', '{"data": [1]}'])
def test_another_kind_of_server_is_one_sentence(answer: str) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=answer))
    with pytest.raises(ChatError, match="no OpenAI-compatible server"):
        Conversation(Options("http://test"), httpx.Client(transport=transport, base_url="http://test"))


@pytest.mark.parametrize("data", ["{", "[]", '{"choices": [1]}'])
def test_an_odd_event_is_one_sentence(data: str) -> None:
    server = FakeServer()
    server.answer = event("Hel") + f"data: {data}\n\n"
    talk = Conversation(Options("http://test"), server.client())
    with pytest.raises(ChatError, match="sent an event"):
        list(talk.ask("Hi"))


def test_bytes_that_are_no_text_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    client = server.client()
    monkeypatch.setattr(chat_client.httpx, "Client", lambda **_: client)
    server.answer = event("é😀")
    typed = io.TextIOWrapper(io.BytesIO(b"a\xff\xfeb\n"), "utf-8")
    shown = io.TextIOWrapper(io.BytesIO(), "ascii")
    options = Options("http://test", api_key="k\udcff", model="m\udcff", system="s\udcff")
    assert run(options, typed, shown) == 0
    assert server.bodies[0]["model"] == "m\ufffd"
    assert [message["content"] for message in server.bodies[0]["messages"]] == ["s\ufffd", "a\ufffd\ufffdb"]
    shown.seek(0)
    assert "??" in shown.read()


def test_no_server_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Options("http://127.0.0.1:9"), io.StringIO(""), io.StringIO()) == 1
    assert capsys.readouterr().err.startswith("pagemill: No server answers at http://127.0.0.1:9")
