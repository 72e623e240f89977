"""`pagemill chat`: a small terminal client for any OpenAI-compatible server. Streams; knows nothing of the engine.

/reset forgets the conversation, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from typing import Any, TextIO

import httpx


@dataclass(frozen=True, slots=True)
class Options:
    base_url: str
    api_key: str | None = None
    model: str | None = None
    system: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None


class ChatError(Exception):
    """The server did not answer as it should; one sentence."""


class Conversation:
    """The messages so far and one HTTP client."""

    def __init__(self, options: Options, client: httpx.Client) -> None:
        self._options = options
        self._client = client
        self.model = _well_formed(options.model) if options.model else self._first_model()
        self.reset()

    def reset(self) -> None:
        system = self._options.system and _well_formed(self._options.system)
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    def ask(self, text: str) -> Iterator[str]:
        """Pieces of the answer as they come. The answer joins the conversation, also when it was stopped; a question
        that got none is forgotten. Raises ChatError."""
        self.messages.append({"role": "user", "content": _well_formed(text)})
        answer: list[str] = []
        try:
            for piece in filter(None, self._stream()):
                answer.append(piece)
                yield piece
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                self.messages.pop()

    def _stream(self) -> Iterator[str]:
        body: dict[str, Any] = {"model": self.model, "messages": self.messages, "stream": True}
        if self._options.temperature is not None:
            body["temperature"] = self._options.temperature
        if self._options.max_tokens is not None:
            body["max_completion_tokens"] = self._options.max_tokens
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise ChatError(_message(response))
                for line in response.iter_lines():
                    if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                        yield self._piece(data)
        except httpx.HTTPError as error:
            raise ChatError(f"The connection to {self._options.base_url} failed: {_reason(error)}.") from None

    def _piece(self, data: str) -> str:
        try:
            event = json.loads(data)
            if "error" not in event:
                return "".join(choice.get("delta", {}).get("content") or "" for choice in event.get("choices", ()))
            told = str(event["error"].get("message"))
        except (ValueError, TypeError, AttributeError):  # not JSON, or not of that shape
            told = f"{self._options.base_url} sent an event that is none of OpenAI's."
        raise ChatError(told)

    def _first_model(self) -> str:
        try:
            response = self._client.get("/v1/models")
        except (httpx.HTTPError, UnicodeError) as error:  # UnicodeError: no host name can look like that
            raise ChatError(f"No server answers at {self._options.base_url}: {_reason(error)}.") from None
        if response.status_code != 200:
            raise ChatError(_message(response))
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ChatError(f"What answers at {self._options.base_url} is no OpenAI-compatible server.") from None


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).rstrip(".")


def _well_formed(text: str) -> str:
    """Bytes of the terminal that are no UTF-8 arrive as lone surrogates, which no JSON can carry."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server answered with status {response.status_code}."


def run(options: Options, stdin: TextIO | None = None, stdout: TextIO | None = None) -> int:
    """The loop at the terminal; returns the exit code."""
    source, out = stdin or sys.stdin, stdout or sys.stdout
    for terminal in (source, out):
        if isinstance(terminal, TextIOWrapper):
            terminal.reconfigure(errors="replace")
    key = (options.api_key or "").encode(errors="surrogateescape")
    headers = {b"Authorization": b"Bearer " + key} if key else {}
    timeout = httpx.Timeout(10.0, read=None)
    base_url = options.base_url.rstrip("/").removesuffix("/v1")
    try:
        opened = httpx.Client(base_url=base_url, headers=headers, timeout=timeout, trust_env=False)
    except (httpx.InvalidURL, UnicodeError) as error:
        print(f"pagemill: --base-url {options.base_url} is no address: {_reason(error)}.", file=sys.stderr)
        return 1
    with opened as client:
        try:
            conversation = Conversation(options, client)
        except ChatError as error:
            print(f"pagemill: {error}", file=sys.stderr)
            return 1
        print(f"{conversation.model} at {base_url}. /reset forgets, /quit leaves.", file=out)
        while (text := _read(source, out)) is not None:
            if text == "/reset":
                conversation.reset()
            elif text:
                _answer(conversation, text, out)
    return 0


def _read(source: TextIO, out: TextIO) -> str | None:
    """The next line; None at the end."""
    print("> ", end="", file=out, flush=True)
    try:
        line = source.readline()
    except KeyboardInterrupt:
        line = ""
    text = line.strip()
    if not line or text == "/quit":
        print(file=out)
        return None
    return text


def _answer(conversation: Conversation, text: str, out: TextIO) -> None:
    pieces = conversation.ask(text)
    try:
        for piece in pieces:
            print(piece, end="", file=out, flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="", file=out)
    except ChatError as error:
        print(f"[{error}]", end="", file=out)
    finally:
        pieces.close()  # type: ignore[attr-defined]  # a generator: ends the HTTP stream now
    print(file=out)
