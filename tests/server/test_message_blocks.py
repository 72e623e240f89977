"""Content blocks of the Messages API become messages of chat."""

from __future__ import annotations

from typing import Any

import pytest

from server.protocol.errors import InvalidRequest
from server.protocol.message_blocks import chat_messages, hold, without_client_headers

USER = {"role": "user", "content": "Hi."}
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.2e5; cc_entrypoint=cli; cch=00000;"


def said(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def chat(messages: list[Any], system: Any = None, *, late_system: bool = True) -> list[dict[str, Any]]:
    return chat_messages(messages, system, set(), late_system=late_system)


def test_strings_and_blocks_say_the_same() -> None:
    assert chat([USER], "Be kind.") == chat([{"role": "user", "content": said("Hi.")}], said("Be kind."))
    assert chat([USER], "Be kind.") == [
        {"role": "system", "content": said("Be kind.")},
        {"role": "user", "content": said("Hi.")},
    ]
    assert chat([USER], None) == chat([USER], "") == chat([USER], [])


@pytest.mark.parametrize(
    "system",
    [
        said(BILLING, "You are kind."),
        said(f"\n{BILLING}\n", "You are kind."),
        said(f"{BILLING}\nYou are kind."),
        f"{BILLING}\n\nYou are kind.",
        f"X-Client-Header: 5\n{BILLING}\nYou are kind.",
    ],
)
def test_what_clients_put_before_a_system_prompt_is_dropped_and_named(system: Any) -> None:
    ignored: set[str] = set()
    first, _ = chat_messages([USER], system, ignored, late_system=True)
    assert first["content"] == said("You are kind.")
    assert ignored <= {"x-anthropic-billing-header", "x-client-header"}
    assert ignored


@pytest.mark.parametrize("text", ["x-a-header:\n" * 200_000, "x-a-header:" + "\n" * 2_000_000, "x-" * 1_000_000])
def test_no_text_takes_long_to_search(text: str) -> None:
    """A search that takes the square of the length would not end within the test's life."""
    assert without_client_headers(text + "a") in ("a", text + "a")


def test_many_short_turns() -> None:
    """The same: joining turn by turn would move gigabytes."""
    thought = {"type": "thinking", "thinking": "t" * 10_000, "signature": "s"}
    (message,) = chat([{"role": "assistant", "content": [thought, *said("x"), CALL]}] * 4000)
    assert len(message["reasoning_content"]) == 4000 * 10_001 - 1
    assert len(message["content"]) == len(message["tool_calls"]) == 4000


@pytest.mark.parametrize("text", ["x-ray header: none", "You: x-a-header: b", "a\nx-anthropic-billing-header: c", ""])
def test_other_words_stay(text: str) -> None:
    assert without_client_headers(text) == text


def test_an_agents_turn_becomes_one_message_and_tool_messages() -> None:
    turn = [
        {"type": "thinking", "thinking": "Two places.", "signature": "s"},
        {"type": "redacted_thinking", "data": "zzz"},
        {"type": "text", "text": "Looking.", "citations": None},
        {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a"}},
        {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": said("A", "B")},
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such file", "is_error": True},
        {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
    ]
    ignored: set[str] = set()
    messages = [USER, {"role": "assistant", "content": turn}, {"role": "user", "content": results}]
    _, assistant, first, second, user = chat_messages(messages, None, ignored, late_system=True)
    function = {"name": "Read", "arguments": {"path": "a"}}
    assert assistant["reasoning_content"] == "Two places."
    assert assistant["content"] == said("Looking.")
    assert assistant["tool_calls"][0] == {"id": "toolu_1", "type": "function", "function": function}
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [{"path": "a"}, {}]
    assert first == {"role": "tool", "tool_call_id": "toolu_1", "content": said("A", "B")}
    assert second == {"role": "tool", "tool_call_id": "toolu_2", "content": said("Error: no such file")}
    assert user == {"role": "user", "content": said("Go on.")}
    assert ignored == {"messages.redacted_thinking"}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "Error: The tool failed."),
        ([], "Error: The tool failed."),
        ("<tool_use_error>gone</tool_use_error>", "<tool_use_error>gone</tool_use_error>"),
        ("ERROR 5", "ERROR 5"),
        ("Exit code 3", "Error: Exit code 3"),
    ],
)
def test_a_failed_tool_says_so(content: Any, told: str) -> None:
    block = {"type": "tool_result", "tool_use_id": "t", "content": content, "is_error": True}
    assert chat([{"role": "user", "content": [block]}])[0]["content"] == said(told)


def test_turns_of_one_role_become_one() -> None:
    calls = [{"type": "tool_use", "id": str(k), "name": "f", "input": {}} for k in range(2)]
    thoughts = [{"type": "thinking", "thinking": str(k), "signature": ""} for k in range(2)]
    messages = [
        USER,
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": [thoughts[0], *said("a"), calls[0]]},
        {"role": "assistant", "content": [thoughts[1], *said("b"), calls[1]]},
    ]
    user, assistant = chat(messages)
    assert user["content"] == said("Hi.", "And?")
    assert assistant["content"] == said("a", "b")
    assert assistant["reasoning_content"] == "0\n1"
    assert [call["id"] for call in assistant["tool_calls"]] == ["0", "1"]


@pytest.mark.parametrize(("late_system", "roles"), [(True, ["user", "system", "user"]), (False, ["user"])])
def test_system_words_in_the_middle(late_system: bool, roles: list[str]) -> None:
    late = {"role": "system", "content": said(BILLING, "Mind the date.")}
    messages = chat([USER, late, USER], late_system=late_system)
    assert [message["role"] for message in messages] == roles
    assert [part["text"] for message in messages for part in message["content"]] == ["Hi.", "Mind the date.", "Hi."]


def test_thinking_that_was_not_shown_comes_back_in_its_signature() -> None:
    block = {"type": "thinking", "thinking": "", "signature": hold("Two häuser.")}
    assert chat([{"role": "assistant", "content": [block]}])[0]["reasoning_content"] == "Two häuser."
    foreign = {"type": "thinking", "thinking": "", "signature": "EqQBCkYI"}
    assert "reasoning_content" not in chat([{"role": "assistant", "content": [foreign]}])[0]


def test_search_results_and_tool_references_are_read_out() -> None:
    found = {"type": "search_result", "title": "T", "source": "s", "content": said("x")}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "Grep"}]}
    user, tool = chat([{"role": "user", "content": [found, result]}])
    assert user["content"] == said("T\ns\nx")
    assert tool["content"] == said("Grep")


def test_what_ran_elsewhere_is_dropped_and_named() -> None:
    blocks = [{"type": "server_tool_use"}, {"type": "web_search_tool_result"}, {"type": "mcp_tool_use"}, *said("x")]
    ignored: set[str] = set()
    (message,) = chat_messages([{"role": "assistant", "content": blocks}], None, ignored, late_system=True)
    assert message["content"] == said("x")
    assert ignored == {f"messages.{name}" for name in ("server_tool_use", "web_search_tool_result", "mcp_tool_use")}


def test_names_are_bounded() -> None:
    blocks = [{"type": f"{k:0100}_tool_result"} for k in range(2)] + [
        {"type": f"{k}_tool_result"} for k in range(2000)
    ]
    ignored: set[str] = set()
    chat_messages([{"role": "assistant", "content": [*blocks, *said("x")]}], None, ignored, late_system=True)
    assert len(ignored) == 1000
    assert max(map(len, ignored)) == 64


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t"}
SEARCH = {"type": "search_result", "title": "T", "source": "s", "content": []}


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (None, ""),
        ("Hi.", ""),
        ({"content": "x"}, ".role"),
        ({"role": "tool", "content": "x"}, ".role"),
        ({"role": "user"}, ".content"),
        ({"role": "user", "content": 5}, ".content"),
        ({"role": "user", "content": ["x"]}, ".content[0]"),
        ({"role": "user", "content": [{"text": "x"}]}, ".content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, ".content[0].text"),
        ({"role": "user", "content": [IMAGE]}, ".content[0]"),
        ({"role": "user", "content": [{"type": "document"}]}, ".content[0]"),
        ({"role": "user", "content": [{"type": "hologram"}]}, ".content[0].type"),
        ({"role": "user", "content": [SEARCH | {"content": [IMAGE]}]}, ".content[0].content[0].type"),
        ({"role": "user", "content": [SEARCH | {"title": None}]}, ".content[0].title"),
        ({"role": "user", "content": [CALL]}, ".content[0].type"),
        ({"role": "user", "content": [RESULT | {"tool_use_id": 5}]}, ".content[0].tool_use_id"),
        ({"role": "user", "content": [RESULT | {"content": [IMAGE]}]}, ".content[0].content[0]"),
        ({"role": "user", "content": [RESULT | {"content": 5}]}, ".content[0].content"),
        ({"role": "user", "content": [RESULT | {"is_error": "no"}]}, ".content[0].is_error"),
        ({"role": "assistant", "content": [RESULT]}, ".content[0].type"),
        ({"role": "assistant", "content": [CALL | {"input": "{}"}]}, ".content[0].input"),
        ({"role": "assistant", "content": [CALL | {"name": None}]}, ".content[0].name"),
        ({"role": "assistant", "content": [CALL | {"id": 5}]}, ".content[0].id"),
        ({"role": "assistant", "content": [{"type": "thinking"}]}, ".content[0].thinking"),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": "thinking:%"}]},
            ".content[0].signature",
        ),
        ({"role": "system", "content": [IMAGE]}, ".content[0].type"),
    ],
)
def test_refused_messages(message: Any, path: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat([USER, message])
    assert refused.value.param == f"messages[1]{path}"
    assert f"messages[1]{path}" in refused.value.message
    assert len(refused.value.message) < 200


@pytest.mark.parametrize(("system", "path"), [(5, "system"), ([5], "system[0]"), ([IMAGE], "system[0].type")])
def test_refused_system_prompts(system: Any, path: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat([USER], system)
    assert refused.value.param == path
