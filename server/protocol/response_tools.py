"""Tools as /v1/responses spells them, as chat does, and back.

| on the wire                          | as chat spells it                                                     |
|--------------------------------------|-----------------------------------------------------------------------|
| function                             | the function                                                          |
| custom (free text, maybe a grammar)  | chat's custom tool                                                    |
| namespace of functions and customs   | each of them, named NAMESPACE__NAME                                   |
| web_search, mcp, file_search, ...    | nothing: we cannot run them. They are dropped, and named              |

A call of the model finds its way back through `Tools.origin`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from server.protocol.errors import InvalidRequest, missing
from server.protocol.parsing import misspelled, short

MAX_TOOLS = 1024
MAX_NAMESPACE_CHARS = 128
NAMESPACE_SEPARATOR = "__"

Choice = str | dict[str, Any] | None


class Origin(NamedTuple):
    """The tool behind a function's name, as the client knows it."""

    name: str
    namespace: str | None = None
    custom: bool = False


def flat_name(name: str, namespace: str | None) -> str:
    """The one name under which the template and the model know a tool."""
    return f"{namespace}{NAMESPACE_SEPARATOR}{name}" if namespace else name


class Tools:
    """The tools of one request.

    for_chat: the tools in chat's spelling. echoed: what the answer repeats: the tools that are in use.
    dropped: those that are not, as words for a header ("tools.web_search").
    Raises InvalidRequest for tools that are malformed, or two of one name."""

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        self.for_chat: list[dict[str, Any]] = []
        self.echoed: list[dict[str, Any]] = []
        self.dropped: list[str] = []
        self._origins: dict[str, Origin] = {}
        self._paths: dict[str, str] = {}  # by function: where the request has the tool
        self._told: list[dict[str, Any]] = self.for_chat
        self._num_given = 0  # those of namespaces too, and those that are dropped
        self._count(len(tools))
        for index, tool in enumerate(tools):
            self._add(tool, f"tools[{index}]")

    def origin(self, function: str) -> Origin:
        """The tool that a call of `function` means; a name that nobody gave is a plain function's."""
        return self._origins.get(function) or Origin(function)

    def path(self, index: int) -> str | None:
        """Where the request has the tool that chat is told of at `index`; None if there is none."""
        if index >= len(self._told):
            return None
        told = self._told[index]
        return self._paths[told[told["type"]]["name"]]

    def _count(self, number: int) -> None:
        """Before they are looked at."""
        self._num_given += number
        if self._num_given > MAX_TOOLS:
            raise InvalidRequest(f"tools must have at most {MAX_TOOLS} tools in all.", param="tools")

    def _add(self, tool: dict[str, Any], path: str) -> None:
        kind = _kind(tool, path)
        if kind in ("function", "custom"):
            self._add_one(tool, path)
            self.echoed.append(_echo(tool))
        elif kind == "namespace":
            self._add_namespace(tool, path)
            self.echoed.append(tool)
        else:
            self.dropped.append(f"tools.{kind}")

    def _add_namespace(self, tool: dict[str, Any], path: str) -> None:
        namespace, inner = _name(tool, path), tool.get("tools")
        if len(namespace) > MAX_NAMESPACE_CHARS:  # it is repeated for each of its tools
            told = f"{path}.name must have at most {MAX_NAMESPACE_CHARS} characters, got {len(namespace)}."
            raise InvalidRequest(told, param=f"{path}.name")
        if not isinstance(inner, list) or not all(isinstance(item, dict) for item in inner):
            raise InvalidRequest(f"{path}.tools must be an array of objects.", param=f"{path}.tools")
        self._count(len(inner))
        about = tool.get("description")
        for index, item in enumerate(inner):
            at = f"{path}.tools[{index}]"
            if item.get("type") in ("function", "custom"):
                self._add_one(item, at, namespace, about if isinstance(about, str) and index == 0 else None)
            else:
                self.dropped.append(f"tools.{_kind(item, at)}")

    def _add_one(
        self, tool: dict[str, Any], path: str, namespace: str | None = None, about: str | None = None
    ) -> None:
        """about: the namespace's own description; it goes before that of its first tool."""
        name, custom = _name(tool, path), tool["type"] == "custom"
        flat = flat_name(name, namespace)
        if flat in self._origins:
            raise InvalidRequest(f"{path}.name is that of an earlier tool: {short(flat)}.", param=f"{path}.name")
        self._origins[flat] = Origin(name, namespace, custom)
        self._paths[flat] = path
        words = [text for text in (about, _text(tool, "description", path)) if text]
        chat: dict[str, Any] = {"name": flat}
        if words:
            chat["description"] = "\n\n".join(words)
        if custom:
            chat["format"] = _format(tool.get("format"), f"{path}.format")
        else:
            chat["parameters"] = _schema(tool, path)
            chat["strict"] = tool["strict"] if isinstance(tool.get("strict"), bool) else None
        self.for_chat.append({"type": tool["type"], tool["type"]: chat})

    # -- tool_choice -----------------------------------------------------------------------------------------------

    def choose(self, choice: Choice) -> tuple[Choice, list[dict[str, Any]]]:
        """(tool_choice, the tools it leaves), both in chat's spelling.

        Raises InvalidRequest, also for a choice that names a dropped tool: without it the answer would be another."""
        if choice is None or isinstance(choice, str):
            return self._mode(choice)
        kind = choice.get("type")
        if kind == "allowed_tools":
            return self._allowed(choice)
        if kind in ("function", "custom"):
            flat = self._named(choice, "tool_choice")
            kind = "custom" if self._origins[flat].custom else "function"
            return {"type": kind, kind: {"name": flat}}, self.for_chat
        raise self._cannot(kind, "tool_choice")

    def _mode(self, mode: str | None) -> tuple[Choice, list[dict[str, Any]]]:
        if mode not in (None, "none", "auto", "required"):
            told = f"tool_choice must be none, auto, required or an object, got {short(mode)}."
            raise InvalidRequest(told, param="tool_choice")
        if mode == "required" and not self.for_chat:
            why = f" ({', '.join(self.dropped)} cannot be run by this server)" if self.dropped else ""
            raise InvalidRequest(f"tool_choice is required, but there are no tools{why}.", param="tool_choice")
        return mode, self.for_chat

    def _allowed(self, choice: dict[str, Any]) -> tuple[Choice, list[dict[str, Any]]]:
        mode, wanted = choice.get("mode"), choice.get("tools")
        if mode is None:
            mode = "auto"
        if mode not in ("auto", "required"):
            told = f"tool_choice.mode must be auto or required, got {short(mode)}."
            raise InvalidRequest(told, param="tool_choice.mode")
        if not isinstance(wanted, list) or not wanted or len(wanted) > MAX_TOOLS:
            told = f"tool_choice.tools must be an array of 1 to {MAX_TOOLS} objects."
            raise InvalidRequest(told, param="tool_choice.tools")
        names = {self._named(item, f"tool_choice.tools[{index}]") for index, item in enumerate(wanted)}
        self._told = [each for each in self.for_chat if each[each["type"]]["name"] in names]
        return mode, self._told

    def _named(self, choice: object, path: str) -> str:
        """The function that `choice` names: by its own name, with its namespace, or alone if only one has it."""
        if not isinstance(choice, dict):
            raise InvalidRequest(f"{path} must be an object, got {short(choice)}.", param=path)
        if choice.get("type") not in ("function", "custom"):
            raise self._cannot(choice.get("type"), path)
        name, namespace = _name(choice, path), choice.get("namespace")
        flat = flat_name(name, namespace if isinstance(namespace, str) else None)
        if flat in self._origins:
            return flat
        found = [each for each, origin in self._origins.items() if origin.name == name]
        if len(found) != 1:
            told = f"{path} names {short(name)}, which is not one of the tools."
            raise InvalidRequest(told, param=f"{path}.name")
        return found[0]

    def _cannot(self, kind: object, path: str) -> InvalidRequest:
        if not isinstance(kind, str):
            return InvalidRequest(f"{path}.type must be a string, got {short(kind)}.", param=f"{path}.type")
        told = f"{path} names a tool of type {short(kind)}, which this server cannot run."
        return InvalidRequest(told, param=path, code="unsupported_tool")


def _kind(tool: dict[str, Any], path: str) -> str:
    kind = tool.get("type")
    if kind is None:
        raise missing(f"{path}.type", misspelled("type", tool))
    if not isinstance(kind, str):
        raise InvalidRequest(f"{path}.type must be a string, got {short(kind)}.", param=f"{path}.type")
    return kind


def _name(tool: dict[str, Any], path: str) -> str:
    name = tool.get("name")
    if name is None:
        raise InvalidRequest(
            f"You must provide the parameter {path}.name.", f"{path}.name", "missing_required_parameter"
        )
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{path}.name must be a string that is not empty.", param=f"{path}.name")
    return name


def _text(tool: dict[str, Any], key: str, path: str) -> str | None:
    value = tool.get(key)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{path}.{key} must be a string, got {short(value)}.", param=f"{path}.{key}")
    return value


def _schema(tool: dict[str, Any], path: str) -> dict[str, Any]:
    schema = tool.get("parameters")
    if schema is None:
        return {"type": "object", "properties": {}}
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{path}.parameters must be an object, got {short(schema)}.", param=f"{path}.parameters")
    return schema


def _format(shape: object, path: str) -> dict[str, Any] | None:
    """A custom tool's format as chat spells it: there the grammar lies one level deeper."""
    if shape is None:
        return None
    if not isinstance(shape, dict) or shape.get("type") not in ("text", "grammar"):
        raise InvalidRequest(f"{path}.type must be text or grammar.", param=f"{path}.type")
    if shape["type"] == "text":
        return {"type": "text"}
    syntax, definition = shape.get("syntax"), shape.get("definition")
    if syntax not in ("lark", "regex") or not isinstance(definition, str):
        raise InvalidRequest(f"{path} needs a syntax, lark or regex, and a definition.", param=path)
    return {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}


def _echo(tool: dict[str, Any]) -> dict[str, Any]:
    return {"parameters": None, "strict": None, **tool} if tool["type"] == "function" else tool
