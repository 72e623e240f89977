"""Logprobs as the two endpoints spell them. Values are finite by the engine's contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.text import TokenEntry
from engine.tokenizer import Tokenizer
from server.shown_prompt import ShownPrompt


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; OpenAI's "bytes:\\xf0\\x9f" where its bytes are no whole characters."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def completion_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenEntry]) -> dict[str, Any]:
    """The legacy object of /v1/completions: parallel lists."""
    return {
        "tokens": [token_text(tokenizer, entry.token_id) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [_alternatives(tokenizer, entry) for entry in entries],
        "text_offset": [entry.text_offset for entry in entries],
    }


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenEntry]) -> dict[str, Any]:
    """The object of /v1/chat/completions: one entry per token, with the token's bytes."""
    return {
        "content": [
            _chat_token(tokenizer, entry.token_id, entry.logprob) | {"top_logprobs": _chat_top(tokenizer, entry)}
            for entry in entries
        ],
        "refusal": None,
    }


def prompt_logprobs(tokenizer: Tokenizer, prompt: ShownPrompt, count: int) -> list[dict[str, Any] | None]:
    """The field prompt_logprobs as vLLM spells it: null for the first token, then per token an object from token id
    to logprob, rank and text, of the token itself and the `count` likeliest."""
    told: list[dict[str, Any] | None] = [None]
    for token_id, (chunk, index) in zip(prompt.token_ids[1:], prompt.logprobs(), strict=True):
        top = chunk.top(index, count)
        ranked = {token_id: (chunk.logprobs[index], chunk.ranks[index])}
        for rank, (other, logprob) in enumerate(zip(top.token_ids, top.logprobs, strict=True), start=1):
            ranked.setdefault(other, (logprob, rank))
        told.append({
            str(each): {"logprob": logprob, "rank": rank, "decoded_token": token_text(tokenizer, each)}
            for each, (logprob, rank) in ranked.items()
        })  # fmt: skip
    return told


def _alternatives(tokenizer: Tokenizer, entry: TokenEntry) -> dict[str, float] | None:
    """Text -> logprob. Two tokens may share a text: the likelier one stays; the chosen token is always there. None
    for the first token of an echoed prompt, which nothing foretells."""
    if entry.logprob is None:
        return None
    found: dict[str, float] = {}
    if entry.top is not None:
        for token_id, logprob in zip(entry.top.token_ids, entry.top.logprobs, strict=True):
            found.setdefault(token_text(tokenizer, token_id), logprob)
    found.setdefault(token_text(tokenizer, entry.token_id), entry.logprob)
    return found


def _chat_top(tokenizer: Tokenizer, entry: TokenEntry) -> list[dict[str, Any]]:
    if entry.top is None:
        return []
    pairs = zip(entry.top.token_ids, entry.top.logprobs, strict=True)
    return [_chat_token(tokenizer, token_id, logprob) for token_id, logprob in pairs]


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> dict[str, Any]:
    return {
        "token": token_text(tokenizer, token_id),
        "logprob": logprob,
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
