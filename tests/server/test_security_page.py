"""docs/security.md names tests: each of them is there."""

from __future__ import annotations

import re
from pathlib import Path

from server.keys import SCOPES
from server.settings import Settings, flag_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[a-z_0-9/]+\.py)(?:::(\w+))?`", PAGE)))


def test_every_test_that_the_page_names_is_there() -> None:
    assert len(NAMED) > 40
    for path, name in NAMED:
        source = (ROOT / path).read_text(encoding="utf-8")
        if name:
            assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE), f"{path}::{name}"
        else:
            assert "def test_" in source, path


def test_every_claim_has_one() -> None:
    for row in re.findall(r"^\| (?!it tries|---|scope|inference|metrics|admin).*$", PAGE, re.MULTILINE):
        assert "`tests/" in row.rsplit("|", 2)[1], row


def test_the_page_knows_the_settings_and_scopes_that_there_are() -> None:
    flags = {flag_of(name) for name in Settings.model_fields} | {"--no-metrics-auth", "--no-status-page"}
    assert set(re.findall(r"--[a-z-]+[a-z]", re.sub(r"\|---.*", "", PAGE))) <= flags
    for scope in SCOPES:
        assert re.search(rf"^\| {scope} \|", PAGE, re.MULTILINE)
