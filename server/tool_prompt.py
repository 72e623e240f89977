"""Tools for a model whose chat template knows none: told in the system message, with calls and results as text.

The form is the one that most open models were trained with (hermes), which the parser of that name reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

FORMAT = "hermes"
MARKS = ("<tool_call>", "</tool_call>")
INSTRUCTIONS = """\
You can call functions. Their descriptions, one per line:
{tools}
To call one, write its name and its arguments as JSON between these tags, and nothing after them:
<tool_call>
{{"name": NAME, "arguments": {{...}}}}
</tool_call>
If no function helps, answer in words."""


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation without tool roles, tool calls and developers; the first message tells of `tools`, if any."""
    if not tools:
        return [_as_text(message) for message in messages]
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    told = INSTRUCTIONS.format(tools=lines)
    said = [_as_text(message) for message in messages]
    if said and said[0]["role"] == "system":
        first = said.pop(0)
        told = f"{first['content']}\n\n{told}" if first["content"] else told
    return [{"role": "system", "content": told}, *said]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = message["role"], message["content"]
    if role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [_call(call) for call in message.get("tool_calls", ())]
    text = "\n".join([content, *calls] if content else calls) if calls else content
    kept = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    return kept | {"role": "system" if role == "developer" else role, "content": text}


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    function = function if isinstance(function, Mapping) else {}
    wire = {"name": function.get("name"), "arguments": function.get("arguments")}
    return f"{MARKS[0]}\n{json.dumps(wire, ensure_ascii=False)}\n{MARKS[1]}"
