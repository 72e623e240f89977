"""Nobody waits a second to see how busy a test machine is."""

from __future__ import annotations

import pytest

from loadtest import machine


@pytest.fixture(autouse=True)
def _short_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LOOK_S", 0.02)
