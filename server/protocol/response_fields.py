"""What is read of the loose objects of /v1/responses: items, their parts, tools and tool_choice. Types that are not
here are dropped or refused by whoever reads them (`response_items.py`, `response_tools.py`).
"""

from __future__ import annotations

from server.protocol.fields import Kinds, Shape, shape

TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")

_HINTS = ("allowed_callers", "async", "cache_control", "defer_loading")
_TOOLS = {
    "function": shape("type", "name", "description", "parameters", "strict", hints=(*_HINTS, "output_schema")),
    "custom": shape("type", "name", "description", format=shape("type", "syntax", "definition"), hints=_HINTS),
}
TOOLS = Kinds(_TOOLS | {"namespace": shape("type", "name", "description", tools=Kinds(_TOOLS), hints=_HINTS)})
_NAMED = dict.fromkeys(("function", "custom"), shape("type", "name", "namespace"))
TOOL_CHOICE = Kinds(_NAMED | {"allowed_tools": shape("type", "mode", tools=Kinds(_NAMED))})

_PART = shape("type", "text", hints=("annotations", "cache_control", "logprobs", "parsed", "prompt_cache_breakpoint"))
_PARTS = Kinds(dict.fromkeys(TEXT_PARTS, _PART) | {"refusal": shape("type", "refusal")})
_MESSAGE = shape("type", "id", "role", content=_PARTS, hints=("end_turn", "phase", "status"))


def _call_shape(payload: str) -> Shape:
    hints = ("async", "caller", "created_by", "parsed_arguments", "status")
    return shape("type", "id", "call_id", "name", "namespace", payload, hints=hints)


_OUTPUT = shape("type", "id", "call_id", output=_PARTS, hints=("caller", "created_by", "name", "namespace", "status"))
ITEMS = Kinds({
    "message": _MESSAGE,
    "reasoning": shape("type", "id", "encrypted_content", content=_PARTS, summary=_PARTS, hints=("status",)),
    "function_call": _call_shape("arguments"),
    "custom_tool_call": _call_shape("input"),
    "function_call_output": _OUTPUT,
    "custom_tool_call_output": _OUTPUT,
    "additional_tools": shape("type", "id", "role", tools=TOOLS, hints=("status",)),
    "item_reference": shape("type", "id"),
}, untyped=_MESSAGE)  # fmt: skip
