"""The pages that derive from the settings: docs/settings.md and config/default.toml.

`python -m server.settings_reference` writes both; a test tells when they are out of date.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from server.settings import Settings, choices_of, env_of, flag_of, is_list, meta

GROUPS = {
    "server": "Server",
    "model": "Model",
    "cache": "KV cache",
    "scheduler": "Scheduler",
    "device": "Device",
}
HEAD = """# Settings

Generated from `server/settings.py` by `python -m server.settings_reference`.

Every setting is a flag of `pagemill serve`, an environment variable and a key of the TOML file that `--config` names.
Flags win over the environment, the environment wins over the file. Sizes are bytes or carry a suffix (96MiB, 2GB).
"""
TOML_HEAD = """# Every setting with its default. Copy what you change: pagemill serve --config FILE.
# Generated from server/settings.py by `python -m server.settings_reference`. No default: the line is a comment.
"""


def default_text(info: FieldInfo) -> str:
    """The default as it would stand in TOML; empty where there is none."""
    if info.default is None or info.default == ():
        return ""
    return json.dumps(info.default)


def by_group() -> Iterator[tuple[str, dict[str, FieldInfo]]]:
    for group, title in GROUPS.items():
        yield title, {name: info for name, info in Settings.model_fields.items() if meta(info)["group"] == group}


def settings_page() -> str:
    lines = [HEAD]
    for title, fields in by_group():
        lines += [f"## {title}", "", "| flag | environment | default | meaning |", "|---|---|---|---|"]
        for name, info in fields.items():
            flag = f"`{flag_of(name)}`"
            if isinstance(info.default, bool):
                flag += f" / `--no-{name.replace('_', '-')}`"
            default = default_text(info).strip('"')
            unit = meta(info)["unit"]
            if default and unit:
                default += f" {unit}"
            meaning = info.description or ""
            if choices := choices_of(info):
                meaning += f" One of {', '.join(choices)}."
            if is_list(info):
                meaning += " A list: repeat the flag, or separate with commas."
            lines.append(f"| {flag} | `{env_of(name)}` | {default} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def default_toml() -> str:
    lines = [TOML_HEAD]
    for title, fields in by_group():
        lines.append(f"# -- {title}")
        for name, info in fields.items():
            unit = meta(info)["unit"]
            lines.append(f"# {info.description}{f' [{unit}]' if unit else ''}")
            value = default_text(info)
            lines.append(f"{name} = {value}" if value else f"# {name} =")
        lines.append("")
    return "\n".join(lines)


def write(root: Path) -> None:
    (root / "docs" / "settings.md").write_text(settings_page(), encoding="utf-8")
    (root / "config" / "default.toml").write_text(default_toml(), encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).parents[1])
