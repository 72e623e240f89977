"""From bytes to a checked wire object, and the words for what is wrong with it.

Everything a client may get wrong becomes an `InvalidRequest` here, before a token is made. Null means absent, numbers
are finite, a bool is no number and a number is no string.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ValidationError, ValidationInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from server.protocol.errors import InvalidRequest, missing

MAX_DEPTH = 128  # levels of JSON
MAX_BRACKETS = 1 << 18  # opening ones, in texts too: each may be an object to make, and all of them hold up the loop

MAX_NAMES = 1 << 18  # of fields, in texts too: an object with a million of them takes a second to read
_TYPE = re.compile(r"(str|int|float|bool|dict|list|tuple)(\[.*\])?\Z")  # how pydantic calls the types of one field
_NAME = re.compile(rb'"[ \t\r\n]*:')

Wire = TypeVar("Wire", bound=BaseModel)


def wrong(message: str) -> PydanticCustomError:
    """An error whose text is told to the client as it stands; `message` begins with a verb ("must be ...")."""
    return PydanticCustomError("pagemill", "{text}", {"text": message})


@dataclass(frozen=True, slots=True)
class Limits:
    """Lengths of lists; the context in which a body is validated."""

    prompts: int = 1024
    messages: int = 4096
    tools: int = 1024


UNCOUNTED = Limits(*[2**31] * 3)


def limit_of(info: ValidationInfo, name: str) -> int:
    limits = info.context if isinstance(info.context, Limits) else Limits()
    return int(getattr(limits, name))


def at_most(limit: int | str) -> BeforeValidator:
    """For a field that is a list: counted before any item is looked at. A megabyte can hold half a million items, and
    pydantic makes an error of a kilobyte for each (with FailFast for the first alone).

    limit: a number, or the name of one of `Limits`."""

    def check(value: object, info: ValidationInfo) -> object:
        most = limit_of(info, limit) if isinstance(limit, str) else limit
        if isinstance(value, list) and len(value) > most:
            raise wrong(f"must have at most {most} items, got {len(value)}.")
        return value

    return BeforeValidator(check)


def parse(body: bytes, kind: type[Wire], limits: Limits = Limits()) -> Wire:
    """JSON bytes -> a checked wire object. Raises InvalidRequest with OpenAI-like words and `param`.

    orjson refuses what this needs refused: NaN, infinities and 1e400, lone surrogates, bytes that are no UTF-8,
    and nesting beyond 1,024 levels, without recursion on the C stack."""
    if not body:
        raise InvalidRequest("The request has no body: it must be a JSON object, sent with its Content-Length.")
    num_brackets = body.count(b"[") + body.count(b"{")
    if num_brackets > MAX_BRACKETS:
        raise InvalidRequest(f"The body has {num_brackets} opening brackets: at most {MAX_BRACKETS} are read.")
    if body.count(b":") > MAX_NAMES and (num_names := sum(1 for _ in _NAME.finditer(body))) > MAX_NAMES:
        raise InvalidRequest(f"The body has {num_names} fields: at most {MAX_NAMES} are read.")
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error.msg} (position {error.pos}).") from None
    if not isinstance(data, dict):
        raise InvalidRequest(f"The body must be a JSON object, got {_json_name(data)}.")
    if num_brackets > MAX_DEPTH:  # few bodies have so many, and fewer so deep
        for name, value in data.items():
            if too_deep(value):
                raise InvalidRequest(f"{name} is nested too deeply: at most {MAX_DEPTH} levels are read.", param=name)
    return check_fields(data, kind, limits)


def too_deep(value: object) -> bool:
    """Whether JSON has more than MAX_DEPTH levels inside each other: more than any schema or argument needs, and fewer
    than what reads, prints or compiles it bears."""
    level = [value] if isinstance(value, (list, dict)) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        children = (child for each in level for child in (each.values() if isinstance(each, dict) else each))
        level = [child for child in children if isinstance(child, (list, dict))]
    return bool(level)


def check_fields(data: dict[str, Any], kind: type[Wire], limits: Limits = UNCOUNTED) -> Wire:
    """A parsed JSON object -> a checked wire object; its lists were counted before, unless there are limits. Raises
    InvalidRequest."""
    try:
        return kind.model_validate(data, context=limits)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=True)
        raise _friendly(details) from None


def short(value: object) -> str:
    """A client's value for a message, as JSON spells it: at most 40 characters."""
    if isinstance(value, (list, dict)):
        return _json_name(value)
    text = json.dumps(value[:41] if isinstance(value, str) else value, ensure_ascii=False, default=repr)
    return text if len(text) <= 40 else text[:37] + "..."


def _json_name(value: object) -> str:
    names = {list: "an array", dict: "an object", str: "a string", bool: "a boolean", int: "a number"}
    return names.get(type(value), "null" if value is None else "a number")


_WANTED = {
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "string_type": "must be a string",
    "bool_type": "must be a boolean",
    "finite_number": "must be a finite number",
    "list_type": "must be an array",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "literal_error": "must be one of {expected}",
}


def _friendly(errors: list[ErrorDetails]) -> InvalidRequest:
    details = errors[0]
    param = path_of(details["loc"])
    kind = details["type"]
    if kind == "missing" or (details["input"] is None and isinstance(details["loc"][-1], str)):  # null is absent
        return missing(param, misspelled(str(details["loc"][-1]), details["input"]))
    if kind == "pagemill":
        return InvalidRequest(f"{param or 'The body'} {details['msg']}", param=param or None)
    # a field of several types brings an error for each, under a name of the type's
    place, given = details["loc"][:-1], details["input"]
    same = [e for e in errors if e["loc"][:-1] == place and e["input"] is given and _TYPE.match(str(e["loc"][-1]))]
    members = dict.fromkeys(e["type"] for e in same if e["type"] in _WANTED)
    if len(members) > 1:
        nouns = " or ".join(_WANTED[each].removeprefix("must be ") for each in members)
        param = path_of(place)
        return InvalidRequest(f"{param} must be {nouns}, got {short(given)}.", param=param)
    wanted = _WANTED.get(kind, f"is invalid ({details['msg']})").format(**details.get("ctx", {})).replace("'", '"')
    return InvalidRequest(f"{param} {wanted}, got {short(details['input'])}.", param=param)


def misspelled(name: str, given: object) -> str:
    """The field that may have been meant, among those of the object that lacks it."""
    keys = [key[:64] for key in given] if isinstance(given, dict) else []
    near = difflib.get_close_matches(name, keys, n=1, cutoff=0.7)
    return f" Is it misspelled as {short(near[0])}?" if near else ""


def text_of(given: dict[str, Any], name: str, path: str, *, filled: bool = False) -> str:
    """A field that must be a string, of an object that is read by hand. path: the object's. filled: and not an empty
    one. Raises InvalidRequest."""
    value = given.get(name)
    if value is None:
        raise missing(f"{path}.{name}", misspelled(name, given))
    if not isinstance(value, str) or (filled and not value):
        wanted = "a string that is not empty" if filled else "a string"
        raise InvalidRequest(f"{path}.{name} must be {wanted}, got {short(value)}.", param=f"{path}.{name}")
    return value


def path_of(location: tuple[int | str, ...]) -> str:
    """("messages", 1, "content") -> "messages[1].content"."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path
