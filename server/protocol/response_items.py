"""The items of a Responses conversation: what clients send, what is kept, and what the chat template is given.

`Reader` checks items as they come from a client and gives them the shape in which they are stored and listed (ids,
lists of parts). `to_messages` then cannot fail. Everything that one turn of the model left behind (its thinking, its
words, its calls) becomes one assistant message again, so that the next turn's prompt begins as the last one ended.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from server.protocol.errors import ApiError, InvalidRequest, missing
from server.protocol.parsing import misspelled, short, text_of
from server.protocol.response_fields import TEXT_PARTS
from server.protocol.response_tools import flat_name

Item = dict[str, Any]

MAX_ID_CHARS = 128
MAX_PARTS = 4096
OWN_SECRET = "pagemill:"  # begins the encrypted_content that we make
ROLES = ("user", "assistant", "system", "developer")
# what tools that we cannot run left in a conversation; nothing of it is text that we could show the model
FOREIGN = frozenset((
    "web_search_call", "file_search_call", "computer_call", "computer_call_output", "code_interpreter_call",
    "image_generation_call", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output",
    "apply_patch_call", "apply_patch_call_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response",
    "mcp_call", "tool_search_call", "tool_search_output", "program", "program_output",
))  # fmt: skip


def new_id(prefix: str) -> str:
    """An id that nobody can guess: "msg_" and 32 hex digits."""
    return prefix + secrets.token_hex(16)


def seal(thinking: str) -> str:
    """`encrypted_content` of a reasoning item: for clients that keep nothing else of it. It hides nothing."""
    return OWN_SECRET + base64.urlsafe_b64encode(thinking.encode()).decode()


def unseal(content: object) -> str:
    """The thinking in an `encrypted_content` of ours; empty for anybody else's."""
    if not isinstance(content, str) or not content.startswith(OWN_SECRET):
        return ""
    try:
        return base64.urlsafe_b64decode(content.removeprefix(OWN_SECRET)).decode()
    except (binascii.Error, ValueError):
        return ""


def references(given: str | Sequence[object]) -> list[str]:
    """The ids of stored items that the input refers to, as often as it does."""
    items = [item for item in given if isinstance(item, dict)] if not isinstance(given, str) else []
    names = [item.get("id") for item in items if _kind(item) == "item_reference"]
    return [name for name in names if isinstance(name, str)]


def _kind(item: Item) -> object:
    """Its type; what has none is a message, or else refers to an item."""
    kind: object = item.get("type")
    return kind if kind is not None else "message" if "role" in item else "item_reference"


class Reader:
    """Checks one request's items. stored: by id, those that it refers to (`references`).

    dropped: items we cannot use, as words for a header ("input.web_search_call"). chosen: ids that the client gave."""

    def __init__(self, stored: Mapping[str, Item]) -> None:
        self._stored = stored
        self.dropped: list[str] = []
        self.chosen: set[str] = set()

    def read(self, given: str | Sequence[object]) -> list[Item]:
        """Raises InvalidRequest, with `param` as "input[1].content[0]"; ApiError 404 for a reference to nothing."""
        if isinstance(given, str):
            return [_message("user", [_part("input_text", given)], None)]
        items = [self._item(item, f"input[{index}]") for index, item in enumerate(given)]
        return [item for item in items if item is not None]

    def _item(self, item: object, path: str) -> Item | None:
        if not isinstance(item, dict):
            raise InvalidRequest(f"{path} must be an object, got {short(item)}.", param=path)
        kind = _kind(item)
        if not isinstance(kind, str):
            raise InvalidRequest(f"{path}.type must be a string, got {short(kind)}.", param=f"{path}.type")
        if kind in FOREIGN:
            self.dropped.append(f"input.{kind}")
            return None
        if kind == "item_reference":
            return self._referenced(item, path)
        reader = _READERS.get(kind)
        if reader is None:
            told = f"{path} has the type {short(kind)}, which is not supported."
            raise InvalidRequest(told, param=f"{path}.type")
        read = reader(item, path)
        if read["id"] == item.get("id"):
            self.chosen.add(read["id"])
        return read

    def _referenced(self, item: Item, path: str) -> Item:
        name = text_of(item, "id", path, filled=True)
        found = self._stored.get(name)
        if found is None:
            raise ApiError(404, f"{path}: there is no stored item with the id {short(name)}.", param=f"{path}.id")
        return found


def _id(item: Item, prefix: str) -> str:
    given = item.get("id")
    return given if isinstance(given, str) and 0 < len(given) <= MAX_ID_CHARS else new_id(prefix)


def _part(kind: str, text: str) -> Item:
    if kind == "output_text":
        return {"type": kind, "text": text, "annotations": []}
    return {"type": kind, "text": text}


def _message(role: str, content: list[Item], given_id: str | None) -> Item:
    id = given_id or new_id("msg_")
    return {"type": "message", "id": id, "role": role, "status": "completed", "content": content}


def _read_message(item: Item, path: str) -> Item:
    role = item.get("role")
    if role not in ROLES:
        told = f"{path}.role must be one of {', '.join(ROLES)}, got {short(role)}."
        raise InvalidRequest(told, param=f"{path}.role")
    kind = "output_text" if role == "assistant" else "input_text"
    content = _texts(item.get("content"), f"{path}.content")
    return _message(role, [_part(kind, text) for text in content], _id(item, "msg_"))


def _texts(content: object, path: str) -> list[str]:
    """The texts of a string or of a list of parts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InvalidRequest(f"{path} must be a string or an array of parts, got {short(content)}.", param=path)
    if len(content) > MAX_PARTS:
        raise InvalidRequest(f"{path} must have at most {MAX_PARTS} parts, got {len(content)}.", param=path)
    return [_text(part, f"{path}[{index}]") for index, part in enumerate(content)]


def _text(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(f"{path} must be an object, got {short(part)}.", param=path)
    kind = part.get("type")
    if kind == "refusal":
        return text_of(part, "refusal", path)
    if kind not in TEXT_PARTS:
        told = f"{path} is a part of type {short(kind)}: only text is supported by this model."
        raise missing(f"{path}.type", misspelled("type", part)) if kind is None else InvalidRequest(told, param=path)
    return text_of(part, "text", path)


def _read_reasoning(item: Item, path: str) -> Item:
    """The thinking itself where it is there or sealed, else what the summary tells of it."""
    content, summary = item.get("content"), item.get("summary")
    texts = _texts(content, f"{path}.content") if content else []
    if not texts and (sealed := unseal(item.get("encrypted_content"))):
        texts = [sealed]
    summaries = _texts(summary, f"{path}.summary") if summary else []
    return {
        "type": "reasoning",
        "id": _id(item, "rs_"),
        "summary": [{"type": "summary_text", "text": text} for text in summaries],
        "content": [{"type": "reasoning_text", "text": text} for text in texts],
    }


def _read_call(item: Item, path: str) -> Item:
    return _call(item, path, "fc_", {"arguments": text_of(item, "arguments", path)})


def _read_custom_call(item: Item, path: str) -> Item:
    return _call(item, path, "ctc_", {"input": text_of(item, "input", path)})


def _call(item: Item, path: str, prefix: str, payload: Item) -> Item:
    call_id, name = text_of(item, "call_id", path, filled=True), text_of(item, "name", path, filled=True)
    read = {"type": item["type"], "id": _id(item, prefix), "call_id": call_id, "name": name, "status": "completed"}
    if isinstance(item.get("namespace"), str):
        read["namespace"] = item["namespace"]
    return read | payload


def _read_output(item: Item, path: str) -> Item:
    output = item.get("output")
    if output is None:
        raise missing(f"{path}.output")
    return {
        "type": item["type"],
        "id": _id(item, "fco_" if item["type"] == "function_call_output" else "cto_"),
        "call_id": text_of(item, "call_id", path, filled=True),
        "output": [_part("input_text", text) for text in _texts(output, f"{path}.output")],
        "status": "completed",
    }


def _read_tools(item: Item, path: str) -> Item:
    tools = item.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequest(f"{path}.tools must be an array of objects.", param=f"{path}.tools")
    return {"type": "additional_tools", "id": _id(item, "at_"), "role": "developer", "tools": tools}


_READERS: dict[str, Callable[[Item, str], Item]] = {
    "message": _read_message,
    "reasoning": _read_reasoning,
    "function_call": _read_call,
    "custom_tool_call": _read_custom_call,
    "function_call_output": _read_output,
    "custom_tool_call_output": _read_output,
    "additional_tools": _read_tools,
}


# -- for the template ---------------------------------------------------------------------------------------------


def to_messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Chat messages of items that `Reader` made, or that an answer consists of."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant message that may still grow
    for item in items:
        kind = item["type"]
        if kind == "additional_tools":
            continue
        if kind.endswith("_output"):
            turn = None
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _joined(item["output"])})
        elif kind == "message" and item["role"] != "assistant":
            turn = None
            messages.append({"role": item["role"], "content": _joined(item["content"])})
        else:
            if turn is None or _begins_anew(kind, turn):
                turn = {"role": "assistant"}
                messages.append(turn)
            _grow(turn, item)
    messages = [message for message in messages if len(message) > 1]  # thinking that nobody can read is no message
    for message in messages:
        if "reasoning_content" in message:
            message["reasoning_content"] = "\n".join(message["reasoning_content"])
        if message["role"] == "assistant" and "tool_calls" not in message:
            message.setdefault("content", "")
    return messages


def _begins_anew(kind: str, turn: dict[str, Any]) -> bool:
    """Whether an item of the assistant belongs to a later turn than `turn`."""
    if kind == "reasoning":
        return "content" in turn or "tool_calls" in turn
    return kind == "message" and "content" in turn


def _grow(turn: dict[str, Any], item: Item) -> None:
    if item["type"] == "reasoning":
        if text := _joined(item.get("content") or item["summary"]):
            turn.setdefault("reasoning_content", []).append(text)  # joined when the turn is whole
        return
    if item["type"] == "message":
        turn["content"] = "".join(part["text"] for part in item["content"])
        return
    kind, field = ("function", "arguments") if item["type"] == "function_call" else ("custom", "input")
    call = {"name": flat_name(item["name"], item.get("namespace")), field: item[field]}
    turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": kind, kind: call})


def _joined(parts: Iterable[Item]) -> str:
    return "\n".join(part["text"] for part in parts)


def cuts(items: Sequence[Item]) -> list[int]:
    """Where a conversation may be cut to become shorter: at its user messages but the first, so that no call is
    parted from its output."""
    return [index for index, item in enumerate(items) if item.get("role") == "user"][1:]


def cut(items: Sequence[Item], start: int) -> list[Item]:
    """The items from `start` on, after the system's and the developer's words from before it."""
    return [item for item in items[:start] if item.get("role") in ("system", "developer")] + list(items[start:])
