"""/admin/...: what an operator does to a running server, and that nobody else can."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.outputs import Phase
from server import logs
from server.app import create_app
from server.settings import Settings
from tests.server.process import stub_server
from tests.server.stub_engine import StubEngine
from tests.server.test_auth import bearer, key_file

KEYS = """
[boss]
sha256 = "{boss}"
scopes = ["admin"]
[user]
sha256 = "{one}"
scopes = ["inference", "metrics"]
"""
PATHS = ["/admin/drain", "/admin/reload", "/admin/reset_prefix_cache", "/admin/log_level"]


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    before = logging.getLogger("pagemill").level
    yield
    logging.getLogger("pagemill").setLevel(before)


class Served:
    def __init__(self, folder: Path) -> None:
        self.engine = StubEngine(ready=True)
        self.num_ends = 0
        app = create_app(Settings(api_key_file=key_file(folder, KEYS)), self.engine, end=self._end)
        transport = httpx.ASGITransport(app)
        self.boss = httpx.AsyncClient(transport=transport, base_url="http://test", headers=bearer("boss"))
        self.user = httpx.AsyncClient(transport=transport, base_url="http://test", headers=bearer("one"))

    def _end(self) -> None:
        self.num_ends += 1


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(tmp_path)


@pytest.mark.parametrize("path", PATHS)
async def test_other_keys_change_nothing(served: Served, path: str) -> None:
    response = await served.user.post(path, json={"level": "error"})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "missing_scope")
    assert (served.num_ends, served.engine.num_resets) == (0, 0)


async def test_an_admin_key_is_good_for_nothing_else(served: Served) -> None:
    assert (await served.boss.post("/v1/completions", json={"prompt": "x"})).status_code == 403
    assert (await served.boss.get("/metrics")).status_code == 403


async def test_resetting_reaches_the_engine_once_it_serves(served: Served) -> None:
    assert (await served.boss.post("/admin/reset_prefix_cache")).status_code == 202
    assert served.engine.num_resets == 1
    served.engine.phase = Phase.STARTING
    assert (await served.boss.post("/admin/reset_prefix_cache")).status_code == 503


async def test_draining_is_asked_for_in_every_phase(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    for count, phase in enumerate(Phase, start=1):
        served.engine.phase = phase
        response = await served.boss.post("/admin/drain")
        assert (response.status_code, response.json()) == (202, {"status": "draining"})
        assert served.num_ends == count
    told = [record.fields for record in caplog.records if record.message == "admin"]  # type: ignore[attr-defined]
    assert told[0] == {"action": "drain", "client": "boss"}


async def test_the_log_level_is_told_and_set(served: Served) -> None:
    for level in ("debug", "warning", "error", "info"):
        assert (await served.boss.post("/admin/log_level", json={"level": level})).json() == {"level": level}
        assert (await served.boss.get("/admin/log_level")).json() == {"level": level}
        assert logs.level_of() == level
        assert logging.getLogger(logs.REQUEST_LOGGER).isEnabledFor(logging.INFO) is (level in ("debug", "info"))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"debug"', b"{}", b'{"level": 10}', b'{"level": "DEBUG"}'])
async def test_a_level_that_is_none_is_the_clients_fault(served: Served, body: bytes) -> None:
    before = logs.level_of()
    response = await served.boss.post("/admin/log_level", content=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "level")
    assert logs.level_of() == before


async def test_drained_by_its_operator_a_server_finishes_what_it_has_and_ends(tmp_path: Path) -> None:
    keys = key_file(tmp_path, KEYS)
    with stub_server(tmp_path / "log", "--interval", "0.02", "--set", f"api_key_file={keys}") as server:
        await asyncio.to_thread(server.wait_for, "ready")
        async with httpx.AsyncClient(base_url=server.url, timeout=30, trust_env=False) as client:
            body: dict[str, Any] = {"prompt": "x", "max_tokens": 50}
            going = asyncio.create_task(client.post("/v1/completions", json=body, headers=bearer("one")))
            await asyncio.sleep(0.3)
            assert (await client.post("/admin/drain", headers=bearer("boss"))).status_code == 202
            await asyncio.sleep(0.1)
            refused = await client.post("/v1/completions", json=body, headers=bearer("one"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_draining")
            answer = await going
            assert answer.json()["usage"]["completion_tokens"] == 50
        assert await asyncio.to_thread(server.wait) == 0
    assert "boss" in server.log
    assert "client=one" not in server.log
    assert "client=user" in server.log
