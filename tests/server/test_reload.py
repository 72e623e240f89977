"""Keys and certificates that change under a running server."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import signal
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import httpx
import pytest

from engine.config import StartError
from server.app import create_app
from server.keys import KeyRing
from server.reload import Reloader
from server.settings import Settings
from tests.server.keys import load_keys
from tests.server.process import ServerProcess, stub_server
from tests.server.stub_engine import StubEngine
from tests.server.test_auth import bearer, key_file
from tests.server.test_tls import certificate

BOSS = '[boss]\nsha256 = "{boss}"\nscopes = ["admin"]\n'
ONE = '[one]\nsha256 = "{one}"\nscopes = ["inference", "metrics"]\n'
TWO = '[two]\nsha256 = "{two}"\n'
BODY = {"prompt": "x", "max_tokens": 2}
BROKEN = {
    "cut short": BOSS + '[one]\nsha256 = "',
    "empty": "",
    "a key twice": BOSS + ONE + ONE.replace("[one]", "[other]"),
    "a name of --api-key": BOSS + ONE.replace("[one]", "[key-1]"),
    "an unknown scope": BOSS.replace("admin", "all"),
}


class Served:
    """An app over a key file, and its administrator."""

    def __init__(self, folder: Path, text: str, **settings: Any) -> None:
        self.folder = folder
        self.app = create_app(
            Settings(api_key_file=key_file(folder, text), api_key=("inline",), **settings), StubEngine(ready=True)
        )
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test")

    async def reload(self, text: str) -> httpx.Response:
        key_file(self.folder, text)
        return await self.client.post("/admin/reload", headers=bearer("boss"))

    async def status(self, key: str) -> int:
        return (await self.client.post("/v1/completions", json=BODY, headers=bearer(key))).status_code


async def test_keys_come_and_go_with_the_file(tmp_path: Path) -> None:
    served = Served(tmp_path, BOSS + ONE)
    assert [await served.status(key) for key in ("one", "two", "inline")] == [200, 401, 200]
    key_file(tmp_path, BOSS + TWO)
    assert await served.status("two") == 401, "nothing is read before it is asked for"
    response = await served.reload(BOSS + TWO)
    told = {"status": "reloaded", "clients": 3, "added": ["two"], "removed": ["one"]}
    assert (response.status_code, response.json()) == (200, told)
    assert [await served.status(key) for key in ("one", "two", "inline")] == [401, 200, 200]
    metrics = served.app.state.metrics.render().decode()
    assert 'client_requests_total{client="two"} 1.0' in metrics
    assert 'client="one"' not in metrics


async def test_a_new_key_of_a_client_finds_what_the_old_one_left_and_no_other_does(tmp_path: Path) -> None:
    served = Served(tmp_path, BOSS + ONE + TWO)

    async def status(id: str, key: str) -> int:
        return (await served.client.get(f"/v1/responses/{id}", headers=bearer(key))).status_code

    made = await served.client.post("/v1/responses", json={"input": "x"}, headers=bearer("one"))
    id = made.json()["id"]
    assert [await status(id, key) for key in ("one", "two")] == [200, 404]
    both = ONE.replace('"{one}"', '["{three}", "{one}"]')
    assert (await served.reload(BOSS + both + TWO)).status_code == 200
    assert [await status(id, key) for key in ("one", "three", "two")] == [200, 200, 404]
    assert (await served.reload(BOSS + TWO)).status_code == 200
    assert (await served.reload(BOSS + TWO + ONE.replace("[one]", "[again]"))).status_code == 200
    assert await status(id, "one") == 404, "the same key, another client"


async def test_a_folder_that_may_not_be_looked_into_keeps_the_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(tmp_path, BOSS + ONE)

    def locked(path: Path, *arguments: Any, **more: Any) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    for method in ("stat", "read_text"):  # root may look everywhere
        monkeypatch.setattr(Path, method, locked)
    response = await served.client.post("/admin/reload", headers=bearer("boss"))
    assert (response.status_code, response.json()["error"]["code"]) == (409, "not_reloaded")
    assert await served.status("one") == 200


@pytest.mark.parametrize("kind", ["api_key_file", "tls_cert"])
def test_what_cannot_be_read_twice_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # opening it would wait for a writer, and the whole server with it
    ring = load_keys([], key_file(tmp_path, ONE))
    reloader = Reloader(Settings(**{kind: str(pipe)}), ring)
    reloader.serve_with(SimpleNamespace(ssl=ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)))
    with pytest.raises(StartError, match="no plain file"):
        reloader.reload()
    assert ring.find([b"one"]) is not None


@pytest.mark.parametrize("text", BROKEN.values(), ids=list(BROKEN))
async def test_a_broken_file_changes_nothing_and_is_told(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served(tmp_path, BOSS + ONE)
    response = await served.reload(text)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (409, "not_reloaded")
    assert error["message"] in caplog.text
    assert [await served.status(key) for key in ("one", "two")] == [200, 401]
    assert (await served.reload(BOSS + TWO)).status_code == 200


async def test_a_file_that_is_gone_keeps_the_keys(tmp_path: Path) -> None:
    served = Served(tmp_path, BOSS + ONE)
    (tmp_path / "keys.toml").unlink()
    response = await served.client.post("/admin/reload", headers=bearer("boss"))
    assert response.status_code == 409
    assert await served.status("one") == 200


async def test_without_files_there_is_nothing_to_read() -> None:
    reloader = Reloader(Settings(api_key=("inline",)), load_keys(["inline"], None))
    assert not reloader.has_files
    assert reloader.reload().facts() == {}


def test_a_client_that_stays_keeps_what_it_has_in_hand(tmp_path: Path) -> None:
    limited = ONE + "tokens_per_minute = 10\nmax_requests = 1\n"
    ring = load_keys([], key_file(tmp_path, limited + TWO))
    reloader = Reloader(Settings(api_key_file=str(tmp_path / "keys.toml")), ring)
    account = ring.find([b"one"])
    assert account is not None
    account.enter(0.0)
    account.spend(50, 0.0)
    key_file(tmp_path, limited.replace("{one}", "{three}") + TWO + "weight = 3\n")
    reloader.reload()
    assert ring.find([b"one"]) is None
    assert ring.find([b"three"]) is account
    assert (account.num_requests, account.num_tokens_total) == (1, 50)
    assert [each.reserved for each in ring.accounts] == [0.25, 0.75]
    account.leave()
    with pytest.raises(Exception, match="tokens per minute"):
        account.enter(1.0)
    key_file(tmp_path, ONE + "tokens_per_minute = 20\n")
    reloader.reload()
    account.enter(1.0)  # another limit starts full


def test_a_ring_that_is_refused_is_as_it_was() -> None:
    ring = load_keys(["a", "b"], None)
    clients = [account.client for account in ring.accounts]
    with pytest.raises(StartError, match="same"):
        ring.replace([clients[0], clients[0]])
    assert isinstance(ring, KeyRing)
    assert [account.client for account in ring.accounts] == clients
    assert ring.find([b"b"]) is ring.accounts[1]


# -- a process -----------------------------------------------------------------------------------------------------


def put(source: tuple[Path, Path], target: tuple[Path, Path]) -> None:
    for old, new in zip(source, target, strict=True):
        shutil.copy(old, new)


def reloaded(server: ServerProcess, text: str, count: int) -> None:
    """After SIGHUP, until the log has said so that often."""
    os.kill(server.pid, signal.SIGHUP)
    for _ in range(500):
        if server.log.count(text) == count:
            return
        time.sleep(0.02)
    raise AssertionError(server.log)


def trusts(server: ServerProcess, cert: Path, key: str) -> int | None:
    """The status of a request of a client that trusts `cert` alone; None: there was no handshake."""
    url = server.url.replace("http:", "https:")
    context = ssl.create_default_context(cafile=str(cert))
    try:
        with httpx.Client(base_url=url, verify=context, trust_env=False, timeout=30) as client:
            return client.post("/v1/completions", json=BODY, headers=bearer(key)).status_code
    except httpx.ConnectError:
        return None


def test_a_hangup_brings_new_keys_and_a_new_certificate_and_ends_no_stream(tmp_path: Path) -> None:
    first, second = certificate(tmp_path, "first"), certificate(tmp_path, "second")
    served = (tmp_path / "served.crt", tmp_path / "served.key")
    put(first, served)
    keys = key_file(tmp_path, ONE)
    switches = [f"tls_cert={served[0]}", f"tls_key={served[1]}", f"api_key_file={keys}"]
    with stub_server(tmp_path / "log", *(part for each in switches for part in ("--set", each))) as server:
        context = ssl.create_default_context(cafile=str(first[0]))
        url = server.url.replace("http:", "https:")
        with httpx.Client(base_url=url, verify=context, trust_env=False, timeout=30) as client:
            for _ in range(500):
                if "ready: serving" in server.log:
                    break
                time.sleep(0.02)
            body = BODY | {"stream": True, "max_tokens": 150}
            with client.stream("POST", "/v1/completions", json=body, headers=bearer("one")) as stream:
                lines = stream.iter_lines()
                next(lines)
                key_file(tmp_path, TWO)
                put(second, served)
                reloaded(server, "info reloaded", 1)
                assert trusts(server, first[0], "two") is None
                assert trusts(server, second[0], "two") == 200
                assert trusts(server, second[0], "one") == 401
                assert list(lines)[-2] == "data: [DONE]", "who is connected goes on"
        put((first[0], second[1]), served)  # a certificate and a key of another
        key_file(tmp_path, ONE)
        reloaded(server, "error not reloaded", 1)
        assert trusts(server, second[0], "two") == 200
        assert trusts(server, second[0], "one") == 401, "all of it, or nothing"
        put(first, served)
        reloaded(server, "info reloaded", 2)
        assert trusts(server, first[0], "one") == 200
        server.signal()
        assert server.wait() == 0


@pytest.fixture
def hangup_is_heard() -> Iterator[None]:
    """Also where the tests run under nohup, which a process that they start would inherit."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup_is_heard")
async def test_a_hangup_ends_a_server_that_has_nothing_to_read(tmp_path: Path) -> None:
    """As it does any program whose terminal is closed."""
    with stub_server(tmp_path / "log") as server:
        await asyncio.to_thread(server.wait_for, "ready")
        server.signal(signal.SIGHUP)
        assert await asyncio.to_thread(server.wait) == -signal.SIGHUP


@pytest.fixture(autouse=True)
def level() -> None:
    logging.getLogger("pagemill").setLevel(logging.INFO)
