"""Responses that run, with the real engine and OpenAI's client: cancelled and dropped ones give back their blocks, and
a background response survives its connection but not the server."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.test_operation import Start, metric
from tests.server.process import ServerProcess

pytestmark = pytest.mark.model

LONG: dict[str, Any] = {"input": "Tell a long story.", "extra_body": {"ignore_eos": True}}
SHORT: dict[str, Any] = {"input": "Name a colour.", "max_output_tokens": 12, "temperature": 0}


def until(condition: Callable[[], Any], within_s: float = 20) -> Any:
    """What `condition` returns once it is true."""
    end = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def is_idle(http: httpx.Client) -> bool:
    text = http.get("/metrics").text
    names = ("num_requests_running", "num_requests_waiting", 'kv_blocks{state="used"}')
    return not any(metric(text, name) for name in names)


def ended(sdk: openai.OpenAI, id: str) -> Any:
    def look() -> Any:
        response = sdk.responses.retrieve(id)
        return None if response.status in ("queued", "in_progress") else response

    return until(look, 60)


def test_in_the_background_as_with_a_connection(sdk: openai.OpenAI, http: httpx.Client) -> None:
    direct = sdk.responses.create(**SHORT)
    made = sdk.responses.create(**SHORT, background=True)
    final = ended(sdk, made.id)
    assert final.output_text == direct.output_text
    assert final.usage.output_tokens == direct.usage.output_tokens
    streamed = list(sdk.responses.create(**SHORT, background=True, stream=True))
    again = list(sdk.responses.retrieve(streamed[0].response.id, stream=True, starting_after=3))
    assert again == streamed[4:]
    assert streamed[-1].response.output_text == direct.output_text
    until(lambda: is_idle(http))


@pytest.mark.parametrize("background", [False, True])
def test_cancelled_ones_give_back_their_blocks(sdk: openai.OpenAI, http: httpx.Client, background: bool) -> None:
    events = iter(sdk.responses.create(**LONG, background=background, stream=True))
    id = next(event.response.id for event in events if event.type == "response.in_progress")
    until(lambda: len(sdk.responses.retrieve(id).output_text) > 10)
    cancelled = sdk.responses.cancel(id)
    until(lambda: is_idle(http))
    *_, last = events
    assert last.type == "response.failed"
    assert last.response.status == cancelled.status == "cancelled"
    assert last.response.output_text == cancelled.output_text != ""


def test_leaving_ends_nothing_in_the_background(sdk: openai.OpenAI, http: httpx.Client) -> None:
    with sdk.responses.create(**LONG, background=True, stream=True, max_output_tokens=60) as stream:
        first = next(iter(stream))
    last = list(sdk.responses.retrieve(first.response.id, stream=True, starting_after=0))[-1]
    assert last.type == "response.incomplete"
    assert last.response.usage.output_tokens == 60
    until(lambda: is_idle(http))


def test_deleted_ones_give_back_their_blocks(sdk: openai.OpenAI, http: httpx.Client) -> None:
    ids = [sdk.responses.create(**LONG, background=True).id for _ in range(3)]
    for id in ids:
        sdk.responses.delete(id)
    until(lambda: is_idle(http))
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(ids[0])


@pytest.fixture
def short_lived(start: Start) -> ServerProcess:
    return start("--grace-period", "0.5")


def test_the_server_ends_them(short_lived: ServerProcess) -> None:
    with httpx.Client(trust_env=False) as transport:
        sdk = openai.OpenAI(base_url=short_lived.url + "/v1", api_key="unused", max_retries=0, http_client=transport)
        events = iter(sdk.responses.create(**LONG, background=True, stream=True))
        next(events)
        sdk.responses.create(**LONG, background=True)
        short_lived.signal()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(events)
        assert short_lived.wait() == 0
    assert "Traceback" not in short_lived.log
