"""Content blocks of the Messages API as messages of chat.

Turns of one role that follow each other become one, as that API promises. A user's turn with tool results becomes
tool messages and, for the words beside them, a user message; an assistant's turn becomes one message with its
words, its thinking and its calls.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any

from server.protocol.errors import InvalidRequest
from server.protocol.fields import Kinds, shape
from server.protocol.parsing import misspelled, short, text_of

MAX_BLOCKS = 4096  # in one message
MAX_IGNORED = 1000  # names
MAX_IGNORED_CHARS = 64
HELD = "thinking:"  # begins a signature that holds the thinking itself, where a client asked not to be shown it
MEDIA = ("image", "document", "container_upload", "file")
RAN_ELSEWHERE = re.compile(r"server_tool_use|mcp_tool_(use|result)|\w+_tool_result")  # traces of Anthropic's own tools

# Lines that client programs put before their system prompt and change from request to request: what follows them
# would never be found in the prefix cache. Possessive, so that no text takes long to search.
CLIENT_HEADERS = re.compile(r"(?:\s*+x-[a-z0-9-]{1,64}?-header:[^\n]*+(?:\n|\Z))++\n*+", re.IGNORECASE)

# What is read of messages and of the system prompt. The types that are not here are dropped, or refused.
_TEXT = shape("type", "text", hints=("cache_control", "citations", "parsed_output"))
_FOUND = shape("type", "title", "source", content=Kinds({"text": _TEXT}), hints=("cache_control", "citations"))
_SAID = {
    "text": _TEXT,
    "search_result": _FOUND,
    "tool_reference": shape("type", "tool_name", hints=("cache_control",)),
}
_BLOCKS = _SAID | {
    "thinking": shape("type", "thinking", "signature"),
    "tool_use": shape("type", "id", "name", "input", hints=("cache_control", "caller", "toolset_name")),
    "tool_result": shape(
        "type", "tool_use_id", "is_error", content=Kinds(_SAID), hints=("cache_control", "toolset_name")
    ),
}
MESSAGES = shape("role", content=Kinds(_BLOCKS), hints=("clear_at", "id", "type"))
SYSTEM = Kinds({"text": _TEXT})

Ignored = set[str]  # names of what was left out, for the client


def chat_messages(
    messages: Sequence[object], system: object, ignored: Ignored, *, late_system: bool
) -> list[dict[str, Any]]:
    """late_system: the model's template takes system messages after the first; where it does not they become words
    of the user. Raises InvalidRequest with the path of what is wrong."""
    chat: list[dict[str, Any]] = []
    if parts := _system_parts(system, "system", ignored):
        chat.append({"role": "system", "content": parts})
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if not isinstance(message, dict):
            raise _wrong(path, f"must be an object, got {short(message)}")
        match message.get("role"):
            case "user":
                _add_user(chat, message, path)
            case "assistant":
                _add(chat, _assistant(message, path, ignored))
            case "system":
                parts = _system_parts(message.get("content"), f"{path}.content", ignored)
                _add(chat, {"role": "system" if late_system or not chat else "user", "content": parts})
            case role:
                raise _wrong(f"{path}.role", f'must be "user", "assistant" or "system", got {short(role)}')
    for message in chat:
        if "reasoning_content" in message:
            message["reasoning_content"] = "\n".join(message["reasoning_content"])
    return chat


def without_client_headers(text: str) -> str:
    """A system prompt without the lines that clients put before it and change on every request."""
    match = CLIENT_HEADERS.match(text)
    return text[match.end() :] if match is not None else text


def hold(thinking: str) -> str:
    """A signature that holds the thinking, for a client that is not to see it but sends it back."""
    return HELD + base64.b64encode(thinking.encode()).decode()


def _add(chat: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """All fields but the role are lists here, so that many short turns cost no more than one long one."""
    last = chat[-1] if chat else None
    if last is None or last["role"] != message["role"]:
        chat.append(message)
        return
    for name in ("content", "reasoning_content", "tool_calls"):
        if name in message:
            last.setdefault(name, []).extend(message[name])


def _add_user(chat: list[dict[str, Any]], message: dict[str, Any], path: str) -> None:
    parts: list[dict[str, str]] = []
    blocks = _blocks(message.get("content"), f"{path}.content")
    for where, block in blocks:
        if block["type"] == "tool_result":
            if parts:
                _add(chat, {"role": "user", "content": parts})
                parts = []
            chat.append(_tool_result(block, where))
        else:
            parts.append(_text_part(block, where))
    if parts or not blocks:
        _add(chat, {"role": "user", "content": parts})


def _assistant(message: dict[str, Any], path: str, ignored: Ignored) -> dict[str, Any]:
    texts: list[dict[str, str]] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    for where, block in _blocks(message.get("content"), f"{path}.content"):
        match block["type"]:
            case "thinking":
                thinking += filter(None, [_thinking(block, where)])
            case "tool_use":
                calls.append(_call(block, where))
            case kind if kind == "redacted_thinking" or RAN_ELSEWHERE.fullmatch(kind):
                _note(ignored, f"messages.{kind}")
            case _:
                texts.append(_text_part(block, where))
    turn: dict[str, Any] = {"role": "assistant", "content": texts}
    if thinking:
        turn["reasoning_content"] = thinking
    if calls:
        turn["tool_calls"] = calls
    return turn


def _blocks(content: object, path: str) -> list[tuple[str, dict[str, Any]]]:
    """(path, block) of each block of a string or an array; every block has a type that is a string."""
    if isinstance(content, str):
        return [(path, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise _wrong(path, f"must be a string or an array of content blocks, got {short(content)}")
    if len(content) > MAX_BLOCKS:
        raise _wrong(path, f"must have at most {MAX_BLOCKS} content blocks, got {len(content)}")
    blocks = []
    for index, block in enumerate(content):
        where = f"{path}[{index}]"
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise _wrong(where, "must be a content block, an object with a type", misspelled("type", block))
        blocks.append((where, block))
    return blocks


def _note(ignored: Ignored, name: str) -> None:
    """Shortened, and not for ever: a client may think up a million."""
    if len(ignored) < MAX_IGNORED:
        ignored.add(name[:MAX_IGNORED_CHARS])


def _text_part(block: dict[str, Any], where: str) -> dict[str, str]:
    kind = block["type"]
    if kind == "text":
        return {"type": "text", "text": text_of(block, "text", where)}
    if kind == "search_result":
        found = _texts(block.get("content"), f"{where}.content", "search result")
        lines = (text_of(block, "title", where), text_of(block, "source", where), *found)
        return {"type": "text", "text": "\n".join(lines)}
    if kind == "tool_reference":
        return {"type": "text", "text": text_of(block, "tool_name", where)}
    if kind in MEDIA:
        raise _wrong(where, f"is of type {kind}: only text is supported by this model")
    raise _wrong(f"{where}.type", f"is {short(kind)}, which is not supported here")


def _system_parts(content: object, path: str, ignored: Ignored) -> list[dict[str, str]]:
    if content is None:
        return []
    parts = []
    for said in _texts(content, path, "system prompt"):
        text = without_client_headers(said)
        if text != said:
            _note(ignored, said.lstrip().partition(":")[0].lower())
        if text:
            parts.append({"type": "text", "text": text})
    return parts


def _texts(content: object, path: str, place: str) -> list[str]:
    """Of a string, or of blocks that must all be text."""
    texts = []
    for where, block in _blocks(content, path):
        if block["type"] != "text":
            raise _wrong(f"{where}.type", f'must be "text" in a {place}, got {short(block["type"])}')
        texts.append(text_of(block, "text", where))
    return texts


def _thinking(block: dict[str, Any], where: str) -> str:
    text = text_of(block, "thinking", where)
    signature = block.get("signature")
    if text or not isinstance(signature, str) or not signature.startswith(HELD):
        return text
    try:
        return base64.b64decode(signature[len(HELD) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise _wrong(f"{where}.signature", "is not one that this server gave") from None


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise _wrong(f"{where}.input", f"must be an object, got {short(arguments)}")
    function = {"name": text_of(block, "name", where), "arguments": arguments}  # an object: the template spells it
    return {"id": text_of(block, "id", where), "type": "function", "function": function}


def _tool_result(block: dict[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content")
    blocks = [] if content is None else _blocks(content, f"{where}.content")
    parts = [_text_part(part, path) for path, part in blocks]
    failed = block.get("is_error")
    if failed not in (None, True, False):
        raise _wrong(f"{where}.is_error", f"must be a boolean, got {short(failed)}")
    if failed:
        parts = _told_as_error(parts)
    return {"role": "tool", "tool_call_id": text_of(block, "tool_use_id", where), "content": parts}


def _told_as_error(parts: list[dict[str, str]]) -> list[dict[str, str]]:
    """Templates know no field for it, so the text says that it is an error, unless it does so itself."""
    first = parts[0]["text"] if parts else "The tool failed."
    if not re.match(r"\W*(tool_use_)?error", first, re.IGNORECASE):
        first = f"Error: {first}"
    return [{"type": "text", "text": first}, *parts[1:]]


def _wrong(path: str, told: str, hint: str = "") -> InvalidRequest:
    return InvalidRequest(f"{path} {told}.{hint}", param=path)
