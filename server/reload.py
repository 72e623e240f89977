"""Files that may change under a running server: the key file, and the certificate with its key. Read again when the
operator says so (SIGHUP, POST /admin/reload); taken all together, or not at all.
"""

from __future__ import annotations

import logging
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from engine.config import StartError
from server.keys import KeyRing, read_clients
from server.settings import Settings

logger = logging.getLogger("pagemill.server")


def certificate_of(settings: Settings) -> ssl.SSLContext:
    """A context with the certificate and key of `settings`, which names them. Raises StartError with one sentence."""
    assert settings.tls_cert is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:  # a password that is asked for at the terminal would hold up the start
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password=lambda: "")
    except ssl.SSLError as error:
        reason = (error.reason or "it is no PEM file").lower().replace("_", " ")
    except OSError as error:
        reason = (error.strerror or "it cannot be read").lower()
    else:
        return context
    files = settings.tls_cert if settings.tls_key is None else f"{settings.tls_cert} and {settings.tls_key}"
    raise StartError(f"Cannot use {files} for TLS: {reason}.")


def _check_plain(path: Path) -> None:
    """Opening a pipe would hold up the event loop until somebody writes. Raises StartError."""
    try:
        mode = path.stat().st_mode
    except OSError:  # whoever reads it says what is wrong
        return
    if not stat.S_ISREG(mode):
        raise StartError(f"{path} is no plain file: it cannot be read a second time.")


@dataclass(frozen=True, slots=True)
class Reloaded:
    """num_clients: that have keys now, None: there is no key file. added, removed: their names. certificate: whether
    new connections get what the files hold now."""

    num_clients: int | None = None
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    certificate: bool = False

    def facts(self) -> dict[str, Any]:
        """What there was to read."""
        facts: dict[str, Any] = {}
        if self.num_clients is not None:
            facts = {"clients": self.num_clients, "added": list(self.added), "removed": list(self.removed)}
        return {**facts, "certificate": True} if self.certificate else facts


class Presenting(Protocol):
    """ssl: what the next TLS handshake shows."""

    ssl: ssl.SSLContext | None


@dataclass(slots=True)
class Reloader:
    """One application's. Everything happens on the event loop, between two requests."""

    settings: Settings
    ring: KeyRing
    _serving: Presenting | None = None

    @property
    def has_files(self) -> bool:
        """Whether there is anything to read again."""
        return self.settings.api_key_file is not None or self.settings.tls_cert is not None

    def serve_with(self, serving: Presenting) -> None:
        """Whose context a reload shall replace, in whole: loading into the one in use would not be atomic, for a key
        that does not fit would leave it with neither."""
        self._serving = serving

    def reload(self) -> Reloaded:
        """Read the files again. Raises StartError with one sentence, which is logged too: nothing has changed then."""
        try:
            reloaded = self._reload()
        except StartError as error:
            logger.error("not reloaded, what was there stays in use: %s", error)
            raise
        logger.info("reloaded", extra={"fields": reloaded.facts()})
        return reloaded

    def _reload(self) -> Reloaded:
        settings = self.settings
        for name in (settings.api_key_file, settings.tls_cert, settings.tls_key):
            if name is not None:
                _check_plain(Path(name).expanduser())
        certificate = certificate_of(settings) if self._serving is not None and settings.tls_cert is not None else None
        added: list[str] = []
        removed: list[str] = []
        if settings.api_key_file is not None:
            before = {account.client.name for account in self.ring.accounts}
            self.ring.replace(read_clients(settings.key_digests(), settings.api_key_file))
            after = {account.client.name for account in self.ring.accounts}
            added, removed = sorted(after - before), sorted(before - after)
        if self._serving is not None and certificate is not None:  # nothing can fail any more
            self._serving.ssl = certificate
        num_clients = None if settings.api_key_file is None else len(self.ring.accounts)
        return Reloaded(num_clients, tuple(added), tuple(removed), certificate is not None)
