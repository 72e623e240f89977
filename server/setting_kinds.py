"""Kinds of values that settings have, and how each is read from a text: sizes, lists, keys, addresses."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretBytes
from pydantic_settings import NoDecode

from server.adapters import LoraModule, parse_modules, shown
from server.digest import digest_of

MULTIPLES = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    MULTIPLES |= {_letter: 1000**_power, f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}


def parse_size(value: object) -> int:
    """Bytes from an integer or a text such as 96MiB, 2GB, 1.5GiB, 500M. Raises ValueError with one sentence."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?(?:I?B)?)\s*", str(value), re.IGNORECASE)
    unit = match[2].upper() if match else "?"
    if match is None or unit not in MULTIPLES:
        raise ValueError(f"must be a size such as 67108864, 96MiB or 2GB, got {shown(value)}")
    return int(float(match[1]) * MULTIPLES[unit]) if "." in match[1] else int(match[1]) * MULTIPLES[unit]


def parse_list(value: object) -> object:
    """Comma-separated texts (or a list of them) become a tuple. Raises ValueError on an empty item: a key from an
    unset variable must not open the server."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        return value
    items = tuple(piece.strip() for text in texts for piece in text.split(","))
    if not all(items):
        raise ValueError("must not be empty")
    return items


def parse_keys(value: object) -> object:
    """As `parse_list`, and of each key its digest alone: nothing needs the key itself."""
    keys = parse_list(value)
    if not isinstance(keys, tuple) or not all(isinstance(key, str) for key in keys):
        raise ValueError("must be a text, or a list of them")
    return tuple(digest_of(key.encode("utf-8", "surrogateescape")) for key in keys)


Size = Annotated[int, BeforeValidator(parse_size)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_list)]
Modules = Annotated[tuple[LoraModule, ...], NoDecode, BeforeValidator(parse_modules)]
Keys = Annotated[tuple[SecretBytes, ...], NoDecode, BeforeValidator(parse_keys)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)]


def not_blank(text: str) -> str:
    if not text.strip():  # from an unset variable; the system would take it for every interface
        raise ValueError("must not be empty")
    return text


def web_address(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an address such as http://127.0.0.1:4318")
    return text
