"""The items and events that a model's parts become."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response

from engine.text import Piece, TokenEntry
from server.assemble import Usage
from server.parsers.base import CallArguments, CallBegin, Content, Part, Reasoning
from server.protocol.errors import ApiError
from server.protocol.response_items import unseal
from server.protocol.response_tools import Tools
from server.protocol.responses import ResponsesRequest, echo
from server.protocol.responses_writer import ResponsesWriter
from tests.server.fake_engine import small_tokenizer
from tests.server.responses_harness import check, events_of

TOKENIZER = small_tokenizer()
USAGE = Usage(10, 5, 2, 3)
TOOLS = [
    {"type": "function", "name": "f", "parameters": {"type": "object"}},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "files", "description": "d", "tools": [{"type": "function", "name": "read"}]},
]
TURN = [
    Reasoning("Let me"),
    Reasoning(" think."),
    Content("\n\n"),
    Content("I look."),
    CallBegin(0, "call_a", "f"),
    CallArguments(0, '{"a":'),
    CallArguments(0, " 1}"),
    CallBegin(1, "call_b", "patch"),
    CallArguments(1, "*** Begin"),
    CallArguments(1, " Patch\n"),
    CallBegin(2, "call_c", "files__read"),
    CallArguments(2, "{}", is_whole=True),
]


class Script:
    """A parser that says its parts, one per piece of text, whatever the text."""

    def __init__(self, parts: list[Part]) -> None:
        self._parts = list(parts)

    def feed(self, text: str) -> list[Part]:
        return [self._parts.pop(0) for _ in range(min(len(text), len(self._parts)))]

    def finish(self) -> list[Part]:
        return self._parts


def writer(parts: list[Part], **options: Any) -> ResponsesWriter:
    body = ResponsesRequest(input="hi", tools=TOOLS)
    tools = Tools(TOOLS)
    given = {"logprobs": False, "sealed": False} | options
    said = echo(body, tools, temperature=1.0, top_p=1.0)
    return ResponsesWriter(
        TOKENIZER, model="m", echo=said, tools=tools, new_parser=lambda: Script(parts), **given
    )  # fmt: skip


def pieces_of(parts: list[Part], finish: Any = "stop", cuts: int = 1) -> list[Piece]:
    texts = ["." * min(cuts, len(parts) - k) for k in range(0, len(parts), cuts)]
    return [*(Piece(text) for text in texts), Piece("", (), finish)]


def streamed(parts: list[Part], finish: Any = "stop", cuts: int = 1, **options: Any) -> list[dict[str, Any]]:
    made = writer(parts, **options)
    body = [made.first_events(Usage(10, 0, 0, 0))]
    body += [made.event(0, piece) for piece in pieces_of(parts, finish, cuts)]
    return events_of((b"".join([*body, made.last_events(USAGE)])).decode())


def comparable(response: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between any two answers."""
    items = [{key: value for key, value in item.items() if key != "id"} for item in response["output"]]
    return {**response, "id": None, "created_at": 0, "completed_at": 0, "output": items}


def test_a_turn_of_everything() -> None:
    final = check(streamed(TURN))
    kinds = [item["type"] for item in final["output"]]
    assert kinds == ["reasoning", "message", "function_call", "custom_tool_call", "function_call"]
    thought, spoke, call, patch, read = final["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Let me think."}]
    assert thought["encrypted_content"] is None
    assert spoke["content"][0]["text"] == "\n\nI look."
    assert (call["name"], call["call_id"], call["arguments"]) == ("f", "call_a", '{"a": 1}')
    assert (patch["name"], patch["input"]) == ("patch", "*** Begin Patch\n")
    assert (read["name"], read["namespace"], read["arguments"]) == ("read", "files", "{}")
    assert {item["status"] for item in final["output"]} == {"completed"}
    assert final["status"] == "completed"
    assert final["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 15,
    }


@given(
    parts=st.lists(
        st.one_of(
            st.sampled_from([Content(" "), Content("a"), Content("\n"), Reasoning("r")]),
            st.sampled_from(["f", "patch", "files__read"]),
        ),
        max_size=8,
    ),
    finish=st.sampled_from(["stop", "length"]),
    cuts=st.integers(1, 4),
)
def test_any_turn_streamed_and_plain(parts: list[Any], finish: str, cuts: int) -> None:
    turn: list[Part] = []
    for k, part in enumerate(parts):
        if isinstance(part, str):
            turn += [CallBegin(k, f"call_{k}", part), CallArguments(k, '{"input": "'), CallArguments(k, 'x"}')]
        else:
            turn.append(part)
    final = check(streamed(turn, finish, cuts))
    plain_writer = writer(turn)
    plain = Response.model_validate_json(plain_writer.answer([pieces_of(turn, finish)], USAGE))
    assert comparable(plain.model_dump(exclude_unset=True)) == comparable(
        Response.model_validate(final).model_dump(exclude_unset=True)
    )
    assert final["output"] or finish == "length"


def test_cut_by_the_limit() -> None:
    final = check(streamed(TURN[:-2], "length"))
    assert final["status"] == "incomplete"
    assert final["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in final["output"]] == ["completed"] * 3 + ["incomplete"]
    only_thinking = check(streamed([Reasoning("hm")], "length"))
    assert [item["type"] for item in only_thinking["output"]] == ["reasoning"]


@pytest.mark.parametrize("parts", [[], [Content("\n")], [Reasoning("hm")], [Reasoning("hm"), Content(" ")]])
def test_there_is_always_a_message_or_a_call(parts: list[Part]) -> None:
    final = check(streamed(parts))
    assert final["output"][-1]["type"] == "message"
    said = "".join(part.text for part in parts if isinstance(part, Content))
    assert final["output"][-1]["content"][0]["text"] == said


def test_blanks_before_a_call_are_no_message() -> None:
    final = check(streamed([Reasoning("r"), Content("\n\n"), CallBegin(0, "c", "f"), Content("\n")]))
    assert [item["type"] for item in final["output"]] == ["reasoning", "function_call"]


def test_sealed_thinking() -> None:
    events = streamed(TURN, sealed=True)
    thought = check(events)["output"][0]
    assert unseal(thought["encrypted_content"]) == "Let me think."
    (added, *_) = (event for event in events if event["type"] == "response.output_item.added")
    assert added["item"]["encrypted_content"] is None


@pytest.mark.parametrize("plain", [True, False])
def test_logprobs_stay_with_the_message(plain: bool) -> None:
    parts: list[Part] = [Reasoning("r"), Content("a"), Content("b"), CallBegin(0, "c", "f")]
    pieces = [
        Piece(".", (TokenEntry(65 + k, -0.5, None, k),), "stop" if k == 3 else None) for k in range(len(parts))
    ]  # fmt: skip
    made = writer(parts, logprobs=True)
    if plain:
        final = Response.model_validate_json(made.answer([pieces], USAGE)).model_dump()
    else:
        body = made.first_events(USAGE) + b"".join(made.event(0, piece) for piece in pieces) + made.last_events(USAGE)
        events = events_of(body.decode())
        final = check(events)
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert [len(event["logprobs"]) for event in deltas] == [1, 1]
    told = final["output"][1]["content"][0]["logprobs"]
    assert [entry["token"] for entry in told] == [TOKENIZER.decode([66]), TOKENIZER.decode([67])]


def test_a_failure_in_mid_stream() -> None:
    made = writer(TURN)
    body = made.first_events(USAGE) + made.event(0, Piece("...."))
    body += made.error_events(ApiError(500, "The request failed inside the engine.", code="engine_error"))
    *_, error, failed = events_of(body.decode())
    assert error["type"] == "error"
    assert error["message"] == error["error"]["message"] == "The request failed inside the engine."
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {
        "code": "server_error",
        "message": "The request failed inside the engine.",
    }
    Response.model_validate(failed["response"])


def test_what_is_kept() -> None:
    kept: list[dict[str, Any]] = []
    final = check(streamed(TURN, keep=kept.append))
    assert [orjson.loads(orjson.dumps(response)) for response in kept] == [final]


@pytest.mark.parametrize(("arguments", "status"), [('{"a": 1}', "completed"), ('{"a": ', "incomplete")])
def test_a_call_that_breaks_off_is_incomplete(arguments: str, status: str) -> None:
    turn = [CallBegin(0, "call_a", "f"), CallArguments(0, arguments, is_whole=status == "completed")]
    final = check(streamed(turn))
    assert final["status"] == "completed"  # the model ended there
    assert [(item["status"], item["arguments"]) for item in final["output"]] == [(status, arguments)]
