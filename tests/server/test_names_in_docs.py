"""What the README, docs/ and our own comments name is there: files, headings, flags, environment, metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.settings import Settings, env_of, flag_of

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")))
}
KINDS = {"", ".py", ".cpp", ".h", ".cu", ".cuh", ".sh", ".toml", ".yaml", ".yml", ".service"}
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for folder in ("engine", "server", "loadtest", "csrc", "config", "deploy", ".ci", ".github")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.is_file() and path.suffix in KINDS and "__pycache__" not in path.parts
} | {name: (ROOT / name).read_text("utf-8") for name in ("Makefile", "Dockerfile", "docker-compose.yml")}
OURS = ("engine", "server", "loadtest", "csrc", "tests", "docs", "config", "deploy")
NAMES = {path.name for folder in OURS for path in (ROOT / folder).rglob("*")} | {path.name for path in ROOT.iterdir()}
PATH = re.compile(rf"(?<![\w/.${{}}*<>-])(?:{'|'.join(OURS)})/[\w./*-]*\w")
BARE = re.compile(r"(?<![\w/.$}{*<>-])[\w-]+\.(?:py|md|cuh?|cpp)\b(?![\w(/-])")
METRICS = ("server/metrics.py", "server/histograms.py", "server/adapter_counts.py", "engine/stats.py")
# flags of other programs that the pages tell to type
FOREIGN = {
    *("--build", "--target", "--read-only", "--rm", "--no-deps", "--entrypoint", "--index-url", "--no-binary"),
    *("--from-literal", "--now", "--homepath", "--storage", "--web", "--fmad", "--allow-requantize"),
}


@pytest.mark.parametrize("name", [*PAGES, *SOURCES])
def test_files_are_there(name: str) -> None:
    text = (PAGES | SOURCES)[name]
    for path in PATH.findall(text):
        assert any(ROOT.glob(re.sub(r"\b[A-Z]{2,}\b|(?<=/)NAME", "*", path))), path
    for bare in BARE.findall(text):
        assert bare in NAMES or bare in ("llama.cpp", "table.md"), bare


def headings(text: str) -> set[str]:
    """As the ends of links: lower case, hyphens, no punctuation."""
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text, re.M)}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[name]):
        path, _, heading = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), link
        assert not heading or heading in headings(target.read_text("utf-8")), link


def flags() -> Iterator[str]:
    """Of the server, the measuring client, our tools, benches and scripts."""
    for name in Settings.model_fields:
        yield flag_of(name)
        yield flag_of(name).replace("--", "--no-", 1)
    for folder in ("server", "loadtest", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            yield from re.findall(r'add_argument\(\s*"(--[\w-]+)"', path.read_text("utf-8"))
    yield from ("--dry", "--help", "--config")


def test_flags_are_there() -> None:
    known = {*flags(), *FOREIGN}
    for name, text in PAGES.items():
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]\b", text)) <= known, name


def test_environment_variables_are_settings() -> None:
    known = {env_of(name) for name in Settings.model_fields}
    for name, text in PAGES.items():
        assert set(re.findall(r"\bPAGEMILL_[A-Z_]+[A-Z]\b", text)) - known <= {"PAGEMILL_CUDA"}, name


def test_metrics_are_there() -> None:
    """Some are shown only when there are keys, or when a model is loaded: so the sources are asked."""
    source = "".join((ROOT / name).read_text("utf-8") for name in METRICS)
    names = {re.sub(r"^num_|_total$", "", word) for word in re.findall(r"\w+", source)}
    for name, text in PAGES.items():
        for metric in re.findall(r"`pagemill_(\w+[a-z])\b(?!_?\*)", text):
            stem = re.sub(r"^adapter_|_(total|bucket|sum|count)$", "", metric)
            assert {stem, re.sub(r"_total$", "", metric)} & names, f"{name}: {metric}"
