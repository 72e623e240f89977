"""An agent's session in the shape that Claude Code sends: 20 turns with thinking and tools over /v1/messages. Every
turn prefills only what is new, though a line of the system prompt changes on every request.

Once over the real scheduler and prefix cache with a scripted model, whose own words come back and must be found in
the cache too, by a strict server, which refuses nothing of it; once over the demo model.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from engine.assembly import EngineParts, new_scheduler
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.outputs import ModelInfo
from server.app import create_app
from server.settings import Settings
from tests.clients.scripted_server import TEMPLATE, ScriptedRunner
from tests.server.fake_engine import small_tokenizer
from tests.server.messages_events import MessageEvents

NUM_TURNS = 20
BLOCK = 16  # tokens of a KV block: what did not fill the last one may be computed again
NAMES = ("Agent", "Bash", "Edit", "Glob", "Grep", "NotebookEdit", "Read", "Skill", "TaskOutput", "WebFetch", "Write")
MARK = {"cache_control": {"type": "ephemeral"}}


class Session:
    """What the client remembers, and the body it makes of it."""

    def __init__(self, model: str, *, num_tools: int, words: int, max_tokens: int, display: str | None = None) -> None:
        self.model = model
        self.max_tokens = max_tokens
        self.display = display
        self.num_requests = 0
        self.system = [
            {"type": "text", "text": "You are an agent that helps with software.", **MARK},
            {"type": "text", "text": "\nKeep to the instructions below. " + "Be careful. " * words, **MARK},
        ]
        self.tools = [tool(name) for name in NAMES[:num_tools]]
        reminder = {"type": "text", "text": "<system-reminder>\nToday is 2026-11-29.\n</system-reminder>"}
        self.messages: list[dict[str, Any]] = [
            {"role": "user", "content": [reminder, {"type": "text", "text": "Look at every file."}]},
            {"role": "system", "content": "Available agent types: general."},
        ]

    def body(self) -> dict[str, Any]:
        self.num_requests += 1
        billing = f"x-anthropic-billing-header: cc_version=2.1.197.{self.num_requests:03x}; cc_entrypoint=cli;"
        *before, last = self.messages
        if isinstance(last["content"], list):  # the mark moves to the newest block, as clients do it
            *blocks, final = last["content"]
            last = {**last, "content": [*blocks, final | MARK]}
        return {
            "model": self.model,
            "messages": [*before, last],
            "system": [{"type": "text", "text": billing}, *self.system],
            "tools": self.tools,
            "metadata": {"user_id": '{"device_id":"d","session_id":"s"}'},
            "max_tokens": self.max_tokens,
            "thinking": {"type": "adaptive"} | ({"display": self.display} if self.display else {}),
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "stream": True,
        }

    def heard(self, content: list[dict[str, Any]]) -> None:
        """The model's turn, and what its tools gave."""
        turn = len(self.messages)
        results = [result(block["id"], turn) for block in content if block["type"] == "tool_use"]
        self.messages += [{"role": "assistant", "content": content}, {"role": "user", "content": results}]


def tool(name: str) -> dict[str, Any]:
    properties = {
        "command": {"type": "string", "description": f"What {name} shall do."},
        "timeout": {"type": "number"},
    }
    schema = {"type": "object", "properties": properties, "required": ["command"], "additionalProperties": False}
    return {"name": name, "description": f"Runs {name}.\n\nUse it with care.", "input_schema": schema}


def result(call_id: str, turn: int) -> dict[str, Any]:
    """Strings, blocks and failures by turns."""
    text = f"file-{turn}.py: {turn * 17} lines"
    content: Any = [{"type": "text", "text": text}] if turn % 4 == 0 else text
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, "is_error": turn % 6 == 0}


def script(prompt: str) -> str:
    """What the scripted model says: thinking, words and a call; at the end, words."""
    turn = prompt.count("<tool_response>")
    if turn >= NUM_TURNS - 1:
        return "<think>\nThat was all.\n</think>\n\nAll files are fine."
    arguments = {"command": f"cat 'datei-ä-{turn}'", "timeout": turn}
    call = json.dumps({"name": "Bash", "arguments": arguments}, ensure_ascii=False)
    return f"<think>\nFile {turn} is next.\n</think>\n\nLooking at it.\n<tool_call>\n{call}\n</tool_call>"


def load(config: EngineConfig) -> EngineParts:
    tokenizer = small_tokenizer(chat_template=TEMPLATE)
    info = ModelInfo(
        name="scripted", source="a script", architecture="Script", max_model_len=1 << 17,
        vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids, dtype="float32", num_parameters=0,
        num_blocks=1 << 14, block_size=BLOCK, kv_bytes_per_token=0, num_threads=1,
    )  # fmt: skip
    runner = ScriptedRunner(tokenizer, script)
    return EngineParts(runner, new_scheduler(config, info), tokenizer, info)  # type: ignore[arg-type]  # a runner all the same


@pytest_asyncio.fixture
async def scripted() -> AsyncIterator[httpx.AsyncClient]:
    chosen = Settings(strict_fields=True)
    engine = AsyncEngine(chosen.engine_config(), load)
    await engine.start()
    transport = httpx.ASGITransport(app=create_app(chosen, engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
    await engine.stop()


@pytest.mark.parametrize("display", [None, "omitted"])
async def test_a_scripted_session(scripted: httpx.AsyncClient, display: str | None) -> None:
    session = Session("scripted", num_tools=len(NAMES), words=200, max_tokens=32_000, display=display)
    known = 0  # tokens that are in the cache: prompt and answer of the turn before
    for turn in range(NUM_TURNS):
        response = await scripted.post("/v1/messages?beta=true", json=session.body())
        assert response.status_code == 200, response.text
        message = MessageEvents(response.text).message
        usage = message["usage"]
        total = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert usage["cache_read_input_tokens"] >= known - BLOCK, f"turn {turn} computes again what was known"
        known = total + usage["output_tokens"] - 1  # the token that ends a turn is never computed
        if turn < NUM_TURNS - 1:
            assert message["stop_reason"] == "tool_use"
            assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
        session.heard(message["content"])
    assert message["content"][-1] == {"type": "text", "text": "All files are fine."}
    assert usage["input_tokens"] < 10 * BLOCK < total / 10


@pytest.mark.model
def test_a_session_with_the_demo_model(http: httpx.Client) -> None:
    """It cannot play an agent, so its turns are given; what it says to them is thrown away."""
    model = http.get("/v1/models").json()["data"][0]["id"]
    session = Session(model, num_tools=2, words=20, max_tokens=3)
    known = 0
    for turn in range(NUM_TURNS):
        response = http.post(
            "/v1/messages?beta=true", json=session.body(), headers={"anthropic-version": "2023-06-01"}
        )
        assert response.status_code == 200, response.text
        usage = MessageEvents(response.text).message["usage"]
        assert usage["cache_read_input_tokens"] >= known - BLOCK, f"turn {turn} computes again what was known"
        known = usage["input_tokens"] + usage["cache_read_input_tokens"]
        call = {"type": "tool_use", "id": f"toolu_{turn}", "name": "Bash", "input": {"command": f"cat {turn}"}}
        session.heard([{"type": "thinking", "thinking": f"File {turn}.", "signature": "s"}, call])
    assert usage["input_tokens"] < known / 4
