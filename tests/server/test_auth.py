"""Who may ask: keys in every spelling, their scopes and limits, and what browsers send for pages of others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.config import StartError
from server import keys
from server.auth import Auth, OriginGate, is_local
from server.digest import digest_of
from server.keys import KeyRing
from tests.server.keys import load_keys

PATHS = [
    "/v1/completions",
    "//v1/completions",
    "/v1//completions",
    "/V1/completions",
    "/v1/completions/",
    "/",
    "/version",
]
PATHS += [
    "/health/",
    "//health",
    "/HEALTH",
    "/health/x",
    "/metrics/",
    "/docs",
    "/openapi.json",
    "/%2fhealth",
    "/health%00",
]


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the name of the client it was let in for."""
    account = scope.get("state", {}).get("account")
    name = account.client.name if account is not None else "-"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": name.encode()})


def client_of(app: ASGIApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def assert_openai_shape(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def key_file(folder: Path, text: str) -> str:
    """{KEY} in the text becomes the digest of that key."""
    for key in ("one", "two", "three", "boss", "eye"):
        text = text.replace("{" + key + "}", digest_of(key.encode()).hex())
    path = folder / "keys.toml"
    path.write_text(text)
    return str(path)


# -- keys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer key-1 x"},
        {"Authorization": "key-1"},
        {"Authorization": "Basic key-1"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer  key-1"},
        {"Authorization": b"Bearer \xff\xfe"},
    ],
)
async def test_every_spelling_needs_the_key(path: str, headers: dict[str, str | bytes]) -> None:
    app = Auth(echo, load_keys(["key-1", "key-2"], None), ["/health", "/metrics"])
    async with client_of(app) as client:
        response = await client.send(client.build_request("POST", "http://test" + path, headers=headers))
    assert response.status_code == 401
    assert assert_openai_shape(response)["code"] == "invalid_api_key"
    assert "key-" not in response.text


@pytest.mark.parametrize("value", ["Bearer key-1", "Bearer key-2", "bearer key-2"])
async def test_each_key_opens(value: str) -> None:
    async with client_of(Auth(echo, load_keys(["key-1", "key-2"], None), [])) as client:
        assert (await client.get("/v1/models", headers={"Authorization": value})).status_code == 200


async def test_open_paths_and_no_keys_at_all() -> None:
    async with client_of(Auth(echo, load_keys(["key"], None), ["/health"])) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/metrics")).status_code == 401
    async with client_of(Auth(echo, load_keys([], None), [])) as client:
        assert (await client.get("/anything")).status_code == 200


# -- key files and scopes -----------------------------------------------------------------------------------------

FILE = """
[alice]
sha256 = ["{one}", "{two}"]
[eye]
sha256 = "{eye}"
scopes = ["metrics"]
[boss]
sha256 = "{boss}"
scopes = ["inference", "metrics", "admin"]
weight = 3
"""


@pytest.mark.parametrize(
    ("key", "path", "status"),
    [
        ("one", "/v1/completions", 200),
        ("two", "/v1/completions", 200),
        ("one", "/metrics", 403),
        ("one", "/admin/drain", 403),
        ("one", "/admin", 403),
        ("eye", "/metrics", 200),
        ("eye", "/v1/models", 403),
        ("eye", "/version", 403),
        ("eye", "/admin/drain", 403),
        ("boss", "/v1/completions", 200),
        ("boss", "/metrics", 200),
        ("boss", "/admin/drain", 200),
        ("inline", "/v1/completions", 200),
        ("inline", "/metrics", 200),
        ("inline", "/admin/drain", 403),
    ],
)
async def test_a_key_is_good_for_its_scopes_alone(tmp_path: Path, key: str, path: str, status: int) -> None:
    app = Auth(echo, load_keys(["inline"], key_file(tmp_path, FILE)), ["/health"])
    async with client_of(app) as client:
        response = await client.post(path, headers=bearer(key))
        assert response.status_code == status
        if status == 403:
            assert assert_openai_shape(response)["code"] == "missing_scope"
            assert key not in response.text.split(), "no answer repeats a key"


async def test_without_keys_nothing_is_open_to_administrators() -> None:
    async with client_of(Auth(echo, KeyRing([]), [])) as client:
        for path in ("/admin/drain", "/admin"):
            response = await client.post(path, headers=bearer("anything"))
            assert response.status_code == 403
            assert "none" in assert_openai_shape(response)["message"]


async def test_two_keys_of_a_client_are_one_client(tmp_path: Path) -> None:
    ring = load_keys([], key_file(tmp_path, FILE))
    assert ring.find([b"one"]) is ring.find([b"wrong", b"two"]) is not None
    assert ring.find([b"boss"]) is not ring.find([b"one"])
    assert ring.find([b"wrong"]) is None
    assert [account.reserved for account in ring.accounts] == [0.2, 0.2, 0.6]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no keys"),
        ("x = ", "is not valid TOML"),
        ("[a]", "[a] needs sha256"),
        ('a = "{one}"', "a must be a table"),
        ('["a b"]\nsha256 = "{one}"', "a client's name"),
        ('[a]\nsha256 = "one"', "[a] needs sha256"),
        ("[a]\nsha256 = []", "[a] needs sha256"),
        ('[a]\nsha256 = "{one}"\nscopes = []', "[a] scopes must be a list"),
        ('[a]\nsha256 = "{one}"\nscopes = ["root"]', "[a] scopes must be a list"),
        ('[a]\nsha256 = "{one}"\nscopes = [["admin"]]', "[a] scopes must be a list"),
        ('[a]\nsha256 = "{one}"\nweight = 0', "[a] weight must lie"),
        ('[a]\nsha256 = "{one}"\nweight = nan', "[a] weight must lie"),
        ('[a]\nsha256 = "{one}"\nmax_requests = 0', "[a] max_requests must be"),
        ('[a]\nsha256 = "{one}"\ntokens_per_minute = 1.5', "[a] tokens_per_minute must be"),
        ('[a]\nsha256 = "{one}"\ncache_group = ""', "[a] cache_group has"),
        ('[a]\nsha256 = "{one}"\nkey = "x"', "[a] has an unknown entry, 'key'"),
        ('[a]\nsha256 = "{one}"\n[b]\nsha256 = "{one}"', "Two API keys are the same."),
        ('[key-1]\nsha256 = "{one}"', "the name key-1 is taken"),
    ],
)
def test_a_bad_key_file_is_one_sentence(tmp_path: Path, text: str, told: str) -> None:
    path = key_file(tmp_path, text)
    with pytest.raises(StartError) as caught:
        load_keys(["inline"], path)
    message = str(caught.value)
    assert told in message
    assert message.endswith(".")
    assert "\n" not in message
    assert digest_of(b"one").hex() not in message


def test_a_missing_key_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="cannot be read: No such file"):
        load_keys([], str(tmp_path / "none"))


def test_a_made_key_opens_with_the_table_that_was_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys.main(["team.a"]) == 0
    printed = capsys.readouterr().out
    key = printed.splitlines()[0].rpartition(" ")[2]
    assert len(key) >= 22, "128 bits"
    ring = load_keys([], key_file(tmp_path, printed))
    account = ring.find([key.encode()])
    assert account is not None
    assert account.client.name == "team.a"
    assert keys.main([]) == keys.main(["a b"]) == 2


# -- limits of a key ----------------------------------------------------------------------------------------------


async def test_a_client_has_so_many_requests_at_a_time_and_others_are_not_held_up(tmp_path: Path) -> None:
    text = '[a]\nsha256 = "{one}"\nmax_requests = 2\n[b]\nsha256 = "{two}"'
    going = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/v1/completions":
            await going.wait()
        await echo(scope, receive, send)

    async with client_of(Auth(slow, load_keys([], key_file(tmp_path, text)), [])) as client:
        first = [asyncio.create_task(client.post("/v1/completions", headers=bearer("one"))) for _ in range(2)]
        await asyncio.sleep(0.01)
        refused = await client.post("/v1/completions", headers=bearer("one"))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert assert_openai_shape(refused)["code"] == "rate_limit_exceeded"
        assert (await client.get("/v1/models", headers=bearer("one"))).status_code == 200, "looking is free"
        other = asyncio.create_task(client.post("/v1/completions", headers=bearer("two")))
        going.set()
        assert [(await task).status_code for task in [*first, other]] == [200] * 3
        assert (await client.post("/v1/completions", headers=bearer("one"))).status_code == 200


def test_tokens_per_minute_come_back_with_time(tmp_path: Path) -> None:
    text = '[a]\nsha256 = "{one}"\ntokens_per_minute = 600'
    (account,) = load_keys([], key_file(tmp_path, text)).accounts

    def refusal(now: float) -> str | None:
        try:
            account.enter(now)
        except keys.ApiError as error:
            return error.headers["Retry-After"]
        account.leave()
        return None

    assert refusal(100.0) is None
    account.spend(600, 100.0)
    assert refusal(100.0) == "1"
    assert refusal(100.1) is None, "10 tokens a second"
    account.spend(101, 100.1)
    assert refusal(100.1) == "11"
    assert refusal(111.0) is None
    account.spend(0, 1000.0)
    account.spend(601, 1000.0)
    assert refusal(1000.0) == "1", "a minute's worth and no more is saved up"
    assert account.num_requests == 0


# -- pages of other origins ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origin", "host", "allowed", "only_local", "status"),
    [
        (None, "evil.test", [], True, 200),
        ("http://evil.test", "127.0.0.1:8000", [], True, 403),
        ("http://evil.test:8000", "evil.test:8000", [], True, 403),
        ("http://evil.test:8000", "evil.test:8000", [], False, 200),
        ("http://127.0.0.1:8000", "127.0.0.1:8000", [], True, 200),
        ("http://localhost:8000", "localhost:8000", [], True, 200),
        ("http://[::1]:8000", "[::1]:8000", [], True, 200),
        ("http://127.0.0.1:9000", "127.0.0.1:8000", [], True, 403),
        ("null", "127.0.0.1:8000", [], True, 403),
        ("null", "null", [], False, 403),
        ("", "", [], False, 403),
        ("http://localhost.evil.test", "localhost.evil.test", [], True, 403),
        ("http://page.test", "127.0.0.1:8000", ["http://page.test"], True, 200),
        ("http://evil.test", "127.0.0.1:8000", ["http://page.test"], True, 403),
        ("http://evil.test", "127.0.0.1:8000", ["*"], True, 200),
    ],
)
async def test_only_our_own_pages_may_ask(
    origin: str | None, host: str, allowed: list[str], only_local: bool, status: int
) -> None:
    headers = {"Host": host} | ({} if origin is None else {"Origin": origin})
    async with client_of(OriginGate(echo, allowed, only_local=only_local)) as client:
        response = await client.post("/v1/completions", headers=headers)
    assert response.status_code == status
    if status == 403:
        assert assert_openai_shape(response)["code"] == "origin_not_allowed"


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True), ("a.localhost", True), ("127.0.0.1", True), ("127.9.9.9:1", True), ("::1", True),
        ("[::1]:80", True), ("0.0.0.0", False), ("10.0.0.1", False), ("localhost.evil.test", False),
        ("127.0.0.1.evil.test", False), ("", False), ("[", False), ("::", False),
    ],
)  # fmt: skip
def test_names_of_this_machine(host: str, local: bool) -> None:
    assert is_local(host) is local
