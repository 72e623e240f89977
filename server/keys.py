"""API keys: who a request comes from, what it may do, and how much.

Two sources: --api-key (or PAGEMILL_API_KEY), whole keys that may use the model and read /metrics; and the file that
--api-key-file names, one table per client:

    [alice]
    sha256 = "..."              # of the key, in hex; a list while a key is being replaced
    scopes = ["inference"]      # or metrics, admin; default: inference
    weight = 2.0                # share of the server beside other clients' when all want more; default 1
    max_requests = 8            # being answered at a time; default: no limit
    tokens_per_minute = 100000  # prompt and output, a minute's worth at once; default: no limit
    cache_group = "team"        # shares the prefix cache with the clients of this group; default: with no other

`python -m server.keys NAME` makes a key and prints its table.

Only digests are kept, of --api-key from the moment it is read. SHA-256 is enough for them: a slow hash protects words
that people choose, of which there are few; a key of 128 random bits cannot be guessed however fast one may try, and a
slow hash would let anybody burn our CPU with wrong keys.
"""

from __future__ import annotations

import hmac
import re
import secrets
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from engine.config import StartError
from server.digest import digest_of
from server.protocol.errors import RATE_LIMITED, ApiError

Scope = Literal["inference", "metrics", "admin"]

SCOPES: tuple[Scope, ...] = get_args(Scope)
WATCH_PATHS = frozenset({"/dashboard/events"})  # who administers may look, too
METRICS_PATHS = frozenset({"/metrics"}) | WATCH_PATHS
KEY_BYTES = 16
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
DIGEST = re.compile(r"[0-9a-f]{64}")
MAX_WEIGHT = 1000.0
CACHE_GROUP = "cache_group"


def scope_of(path: str) -> Scope:
    """What a key must be good for to ask for this path."""
    if path == "/admin" or path.startswith("/admin/"):
        return "admin"
    return "metrics" if path in METRICS_PATHS else "inference"


def is_good_for(scopes: Collection[Scope], path: str) -> bool:
    """Whether a key of these scopes may ask for this path."""
    return scope_of(path) in scopes or (path in WATCH_PATHS and "admin" in scopes)


@dataclass(frozen=True, slots=True)
class Client:
    """One holder of keys, as configured. weight: positive. cache_group: whose prefix cache it shares."""

    name: str
    digests: tuple[bytes, ...]
    scopes: frozenset[Scope]
    cache_group: str
    weight: float = 1.0
    max_requests: int | None = None
    tokens_per_minute: int | None = None


class Account:
    """What a client uses now. reserved: its share of the waiting queue that others cannot take, 0 to 1. A new key file
    may change both; what is in hand stays."""

    def __init__(self, client: Client, reserved: float) -> None:
        self.id = secrets.token_hex(16)  # what it owns is its own, whatever its name and keys become
        self.client = client
        self.reserved = reserved
        self.num_requests = 0
        self.num_requests_total = 0
        self.num_tokens_total = 0
        self._tokens = float(client.tokens_per_minute or 0)
        self._counted_s: float | None = None  # when that many were left

    def become(self, client: Client, reserved: float) -> None:
        """The same holder by other terms: a new limit of tokens starts full, what is being answered still counts."""
        if client.tokens_per_minute != self.client.tokens_per_minute:
            self._tokens, self._counted_s = float(client.tokens_per_minute or 0), None
        self.client, self.reserved = client, reserved

    def enter(self, now: float) -> None:
        """A request begins; `leave` must follow. now: time.monotonic(). Raises ApiError 429."""
        limit, rate = self.client.max_requests, self.client.tokens_per_minute
        if limit is not None and self.num_requests >= limit:
            told = f"This API key has {limit} requests being answered, as many as it may."
            raise ApiError(429, told, code=RATE_LIMITED, headers={"Retry-After": "1"})
        if rate is not None and (left := self._refill(now, rate)) <= 0:
            told = f"This API key has used its {rate} tokens per minute."
            wait_s = 1 + int(-left * 60 / rate)
            raise ApiError(429, told, code=RATE_LIMITED, headers={"Retry-After": str(wait_s)})
        self.num_requests += 1
        self.num_requests_total += 1

    def leave(self) -> None:
        self.num_requests -= 1

    def spend(self, num_tokens: int, now: float) -> None:
        """What an answer has used: it is counted at its end, so what is in flight may go beyond the limit."""
        self.num_tokens_total += num_tokens
        if (rate := self.client.tokens_per_minute) is not None:
            self._tokens = self._refill(now, rate) - num_tokens

    def _refill(self, now: float, rate: int) -> float:
        before = now if self._counted_s is None else self._counted_s
        self._tokens = min(float(rate), self._tokens + (now - before) * rate / 60)
        self._counted_s = now
        return self._tokens


class KeyRing:
    """All clients. Finding one takes the same time whichever key a wrong one resembles."""

    def __init__(self, clients: Sequence[Client]) -> None:
        """Raises StartError for a key that two clients have."""
        self.accounts: tuple[Account, ...] = ()
        self._digests: list[tuple[bytes, Account]] = []
        self.replace(clients)

    def replace(self, clients: Sequence[Client]) -> None:
        """From now on these are the clients, all at once. One that was here under the same name keeps its account;
        requests of one that is gone are answered. Raises StartError as above: nothing has changed then."""
        digests = [digest for client in clients for digest in client.digests]
        if len(set(digests)) < len(digests):
            raise StartError("Two API keys are the same.")
        known = {account.client.name: account for account in self.accounts}
        total = sum(client.weight for client in clients)
        self.accounts = tuple(_account(client, client.weight / total, known.get(client.name)) for client in clients)
        self._digests = [(digest, account) for account in self.accounts for digest in account.client.digests]

    def __bool__(self) -> bool:
        return bool(self.accounts)

    def find(self, keys: Iterable[bytes]) -> Account | None:
        """Of the first of the keys that is one of ours."""
        found: Account | None = None
        for key in keys:
            digest = digest_of(key)
            for known, account in self._digests:  # all, so that time tells nothing
                if hmac.compare_digest(digest, known) and found is None:
                    found = account
        return found


def _account(client: Client, reserved: float, known: Account | None) -> Account:
    if known is None:
        return Account(client, reserved)
    known.become(client, reserved)
    return known


def read_clients(digests: Sequence[bytes], file: str | None) -> list[Client]:
    """digests: of keys without a table; file: the path of a key file. Raises StartError with one sentence."""
    scopes: frozenset[Scope] = frozenset({"inference", "metrics"})
    clients = [
        Client(f"key-{number}", (digest,), scopes, cache_group=f"key-{number}")
        for number, digest in enumerate(dict.fromkeys(digests), start=1)
    ]
    if file is not None:
        clients += _read(Path(file))
    names = [client.name for client in clients]
    for name in names:
        if names.count(name) > 1:
            raise StartError(f"--api-key-file {file}: the name {name} is taken by an --api-key.")
    return clients


def _read(path: Path) -> list[Client]:
    try:
        tables = tomllib.loads(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"--api-key-file {path} cannot be read: {getattr(error, 'strerror', error)}.") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise StartError(f"--api-key-file {path} is not valid TOML: {error}.") from None
    if not tables:  # a file that was cut short must not open the server
        raise StartError(f"--api-key-file {path} holds no keys.")
    try:
        return [_client(name, table) for name, table in tables.items()]
    except ValueError as error:
        raise StartError(f"--api-key-file {path}: {error}.") from None


def _client(name: str, table: object) -> Client:
    """Raises ValueError with the rest of a sentence, which quotes no value."""
    if not NAME.fullmatch(name):
        raise ValueError("a client's name has 1 to 64 letters, digits, dots, dashes and underscores")
    if not isinstance(table, dict):
        raise ValueError(f"{name} must be a table, [{name}]")
    known = {"sha256", "scopes", "weight", "max_requests", "tokens_per_minute", CACHE_GROUP}
    if unknown := [key for key in table if key not in known]:
        raise ValueError(f"[{name}] has an unknown entry, {unknown[0][:40]!r}")
    return Client(
        name,
        _digests(name, table.get("sha256")),
        _scopes(name, table.get("scopes", ["inference"])),
        cache_group=_group(name, table),
        weight=_weight(name, table.get("weight", 1.0)),
        max_requests=_limit(name, table, "max_requests"),
        tokens_per_minute=_limit(name, table, "tokens_per_minute"),
    )


def _digests(name: str, value: object) -> tuple[bytes, ...]:
    given = value if isinstance(value, list) else [value]
    texts = [text for text in given if isinstance(text, str) and DIGEST.fullmatch(text.lower())]
    if not given or len(texts) < len(given):
        raise ValueError(f"[{name}] needs sha256, the digest of its key (64 hexadecimal digits), or a list of them")
    return tuple(map(bytes.fromhex, texts))


def _scopes(name: str, value: object) -> frozenset[Scope]:
    if not isinstance(value, list) or not value or not all(scope in SCOPES for scope in value):
        raise ValueError(f"[{name}] scopes must be a list of {', '.join(SCOPES)}")
    return frozenset(value)


def _weight(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 / MAX_WEIGHT <= value <= MAX_WEIGHT:
        raise ValueError(f"[{name}] weight must lie between {1 / MAX_WEIGHT:g} and {MAX_WEIGHT:g}")
    return float(value)


def _limit(name: str, table: Mapping[str, Any], entry: str) -> int | None:
    value = table.get(entry)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"[{name}] {entry} must be a positive number")
    return value


def _group(name: str, table: Mapping[str, Any]) -> str:
    """A group's name cannot be taken for a client's."""
    value = table.get(CACHE_GROUP)
    if value is None:
        return name
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ValueError(f"[{name}] {CACHE_GROUP} has 1 to 64 letters, digits, dots, dashes and underscores")
    return f"group:{value}"


def main(argv: Sequence[str]) -> int:
    """NAME: print a new key and the table that a key file needs for it."""
    if len(argv) != 1 or not NAME.fullmatch(argv[0]):
        print("usage: python -m server.keys NAME (letters, digits, dots, dashes, underscores)", file=sys.stderr)
        return 2
    key = "sk-" + secrets.token_urlsafe(KEY_BYTES)
    table = f'["{argv[0]}"]\nsha256 = "{digest_of(key.encode()).hex()}"\nscopes = ["inference"]'
    print(f"# the key, shown this once: {key}\n{table}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
