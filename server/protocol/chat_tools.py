"""Tools of a chat request: which of them the model is told of, and which of them it must call.

A custom tool (free text) becomes a function with one string for the template and the model; `chat_writer.py` turns
its calls back. Tools that only OpenAI's own servers can run are dropped, and named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from engine.sampling_params import StructuredOutput
from server.protocol.custom_input import CUSTOM_FIELD
from server.protocol.errors import InvalidRequest
from server.protocol.fields import Kinds, WireModel, shape
from server.protocol.parsing import short, wrong

MAX_NAME_CHARS = 256
MAX_FORMATS = 64  # tools whose input has a grammar: each is compiled

ToolChoice = str | dict[str, Any] | None

_SYNTAXES: dict[str, Literal["lark", "regex"]] = {"lark": "lark", "regex": "regex"}

_FUNCTION = shape("type", "name", function=shape("name"))
_NAMED = {"function": _FUNCTION, "custom": shape("type", "name", custom=shape("name"))}
_ALLOWED = shape("mode", tools=Kinds(_NAMED, untyped=_FUNCTION))
TOOL_CHOICE = Kinds(_NAMED | {"allowed_tools": shape("type", allowed_tools=_ALLOWED)}, untyped=_FUNCTION)


def _name(value: object) -> object:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARS or not value.isprintable():
        raise wrong(f"must be a name of 1 to {MAX_NAME_CHARS} printable characters, got {short(value)}.")
    return value


Name = Annotated[str, BeforeValidator(_name)]


class Function(WireModel):
    hints: ClassVar = frozenset({"cache_control", "type"})

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Custom(WireModel):
    shapes: ClassVar = {"format": shape("type", grammar=shape("syntax", "definition"))}

    name: Name
    description: str | None = None
    format: dict[str, Any] | None = None


class Tool(WireModel):
    """type: "function", "custom", or one that we cannot run; then nothing else is looked at."""

    hints: ClassVar = frozenset({"cache_control", "id"})

    type: Annotated[str, BeforeValidator(lambda given: "function" if given is None else given)] = "function"
    function: Function | None = None
    custom: Custom | None = None

    @property
    def is_dropped(self) -> bool:
        return self.type not in ("function", "custom")

    @property
    def name(self) -> str | None:
        """None for a tool that we cannot run."""
        named = {"function": self.function, "custom": self.custom}.get(self.type)
        return named.name if named is not None else None

    def for_template(self) -> dict[str, Any]:
        """As OpenAI spells a function tool, without what no model was trained to see; for a tool with a name."""
        if self.type == "custom":
            assert self.custom is not None
            return _custom_function(self.custom)
        assert self.function is not None
        given = self.function
        function: dict[str, Any] = {"name": given.name}
        if given.description is not None:
            function["description"] = given.description
        function["parameters"] = given.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


def _custom_function(custom: Custom) -> dict[str, Any]:
    words = [custom.description] if custom.description else []
    grammar = (custom.format or {}).get("grammar")
    if isinstance(grammar, dict) and isinstance(grammar.get("definition"), str):
        words.append(f"The input must match this {grammar.get('syntax', '')} grammar:\n{grammar['definition']}")
    schema = {
        "type": "object",
        "properties": {CUSTOM_FIELD: {"type": "string"}},
        "required": [CUSTOM_FIELD],
        "additionalProperties": False,
    }
    function: dict[str, Any] = {"name": custom.name, "parameters": schema}
    if words:
        function["description"] = "\n\n".join(words)
    return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """tools: what the template and the parser are given, as functions. forced: names of which one must be called;
    empty: the model decides. custom: names whose calls are free text. inputs: by name the format of that text, where
    it has one. paths: by name the field of the request with the tool's schema or format. ignored: what was dropped,
    for the header."""

    tools: list[dict[str, Any]] = field(default_factory=list)
    forced: tuple[str, ...] = ()
    parallel: bool = True
    custom: frozenset[str] = frozenset()
    inputs: dict[str, StructuredOutput] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


def plan(
    tools: Sequence[Tool] | None, choice: ToolChoice, *, parallel: bool | None, has_form: bool = False
) -> ToolPlan:
    """has_form: the answer is held to a form, or to calls.

    Raises InvalidRequest for a malformed tool or choice, and for a choice that no tool here can serve."""
    known: dict[str, Tool] = {}
    inputs: dict[str, StructuredOutput] = {}
    paths: dict[str, str] = {}
    places: dict[str, int] = {}
    dropped: list[str] = []
    replaced: list[str] = []
    for index, tool in enumerate(tools or ()):
        if tool.is_dropped:
            dropped.append(tool.type)
            continue
        if tool.name is None:
            path = f"tools[{index}].{tool.type}"
            raise InvalidRequest(f"You must provide the parameter {path}.", path, "missing_required_parameter")
        if tool.name in known:  # of two tools of one name, the last counts
            replaced.append(f"tools[{places[tool.name]}]")
            inputs.pop(tool.name, None)
        known[tool.name], places[tool.name] = tool, index
        paths[tool.name] = f"tools[{index}].function.parameters"
        if tool.type == "custom" and (wanted := _input(tool.custom, f"tools[{index}].custom.format")) is not None:
            inputs[tool.name] = wanted
            paths[tool.name] = wanted.param
    if len(inputs) > MAX_FORMATS:
        raise InvalidRequest(f"At most {MAX_FORMATS} tools may have a grammar for their input.", param="tools")
    names, forced = _chosen(choice, known, dropped)
    unkept = [] if forced or has_form else _unkept(known.values(), bool(inputs))
    if parallel is None:  # who names one tool expects one call; small models would go on calling it
        parallel = not (isinstance(choice, dict) and choice.get("type") != "allowed_tools")
    return ToolPlan(
        tools=[known[name].for_template() for name in names],
        forced=tuple(forced),
        parallel=parallel,
        custom=frozenset(name for name in names if known[name].type == "custom"),
        inputs=inputs,
        paths=paths,
        ignored=(*(f"tools.{kind}" for kind in dict.fromkeys([*dropped, *unkept])), *replaced),
    )


def _input(custom: Custom | None, path: str) -> StructuredOutput | None:
    """What a format says the input must match; None for free text. Raises InvalidRequest."""
    given = custom.format if custom is not None else None
    if given is None or given.get("type") == "text":
        return None
    if given.get("type") != "grammar":
        told = f"{path}.type must be text or grammar, got {short(given.get('type'))}."
        raise InvalidRequest(told, param=f"{path}.type")
    grammar, path = given.get("grammar"), f"{path}.grammar"
    if not isinstance(grammar, dict):
        raise InvalidRequest(f"{path} must be an object, got {short(grammar)}.", param=path)
    kind, definition = _SYNTAXES.get(str(grammar.get("syntax"))), grammar.get("definition")
    if kind is None:
        told = f"{path}.syntax must be lark or regex, got {short(grammar.get('syntax'))}."
        raise InvalidRequest(told, param=f"{path}.syntax")
    path = f"{path}.definition"
    if not isinstance(definition, str) or not definition:
        raise InvalidRequest(f"{path} must be a string that is not empty, got {short(definition)}.", param=path)
    return StructuredOutput(kind, definition, path)


def _unkept(tools: Iterable[Tool], has_inputs: bool) -> list[str]:
    """What only calls that a grammar holds to their tools' schemas and formats keep."""
    is_strict = any(tool.function is not None and tool.function.strict for tool in tools)
    return ["strict"] * is_strict + ["format"] * has_inputs


def _chosen(choice: ToolChoice, known: dict[str, Tool], dropped: list[str]) -> tuple[list[str], list[str]]:
    """(names of the tools to tell of, names of which one must be called)."""
    if choice is None or choice == "auto":
        return list(known), []
    if choice == "none":
        return [], []
    if choice == "required":
        if not known:
            told = f", but this server cannot run {short(dropped[0])}" if dropped else " needs tools"
            raise InvalidRequest(f'tool_choice "required"{told}.', param="tool_choice")
        return list(known), list(known)
    if isinstance(choice, str):
        told = f"tool_choice must be none, auto, required or an object, got {short(choice)}."
        raise InvalidRequest(told, param="tool_choice", code="invalid_value")
    if choice.get("type") == "allowed_tools":
        return _allowed(choice, known, dropped)
    return list(known), [_named(choice, known, dropped)]


def _allowed(choice: dict[str, Any], known: dict[str, Tool], dropped: list[str]) -> tuple[list[str], list[str]]:
    allowed = choice.get("allowed_tools")
    tools = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(allowed, dict) or not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        told = "tool_choice.allowed_tools must be an object with an array of tools."
        raise InvalidRequest(told, param="tool_choice.allowed_tools")
    mode = allowed.get("mode")
    if mode not in ("auto", "required"):
        told = f"tool_choice.allowed_tools.mode must be auto or required, got {short(mode)}."
        raise InvalidRequest(told, param="tool_choice.allowed_tools.mode")
    names = list(dict.fromkeys(_named(tool, known, dropped) for tool in tools))
    return names, names if mode == "required" else []


def _named(choice: dict[str, Any], known: dict[str, Tool], dropped: list[str]) -> str:
    kind = "function" if choice.get("type") is None else choice["type"]
    if kind not in ("function", "custom"):
        told = f"tool_choice names a tool of type {short(kind)}, which this server cannot run."
        raise InvalidRequest(told, param="tool_choice", code="unsupported_tool")
    inner = choice.get(kind)
    name = inner.get("name") if isinstance(inner, dict) else choice.get("name")
    if not isinstance(name, str):
        raise InvalidRequest(f"tool_choice.{kind}.name must be a string.", param=f"tool_choice.{kind}.name")
    if name not in known:
        told = (
            f"tool_choice names {short(name)}, which is not one of the tools." if known else "tool_choice needs tools."
        )
        raise InvalidRequest(told, param="tool_choice")
    return name
