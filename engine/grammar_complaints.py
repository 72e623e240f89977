"""What is wrong with a grammar, in sentences for the person who wrote it.

llguidance's own words come with dumps of the source, places in it and inner names; the source, moreover, may be one
that we wrote around what was given. Each sentence here goes on after "FIELD is not usable: ".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from engine.schema_place import place_of

MAX_CHARS = 300

NOTHING_MATCHES: Final = "nothing can match it, or it refers to itself without end."
DEAD_END: Final = "it leads to a place where nothing can follow."
TOO_COMPLEX: Final = "it is too complex."

_SOURCE_LINE = re.compile(r"\n *\d+ \| ")  # from here on the compiler shows the source
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_OURS = re.compile(r'^(?:failed to compile JSON schema: |invalid regex ".*?" \(in regex\): )', re.DOTALL)
_LIMITS = re.compile(r"lexer error: |parser error: |.*\b(?:too (?:big|large|many|complex)|limit)\b", re.IGNORECASE)
_KEYWORDS = re.compile(r'"((?:[^"\\]|\\.)*)"')
_UNENFORCED = re.compile(r"^Unimplemented keys: \[(.*)\]")


def told(keywords: Sequence[str]) -> str:
    """In quotes, as part of a sentence."""
    quoted = [f'"{keyword}"' for keyword in keywords]
    return " and ".join(filter(None, (", ".join(quoted[:-1]), quoted[-1])))


# the first that is found tells; the rest of the match is at hand
_KNOWN: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"^NoExtension"), lambda _: NOTHING_MATCHES),
    (
        re.compile(r"regex parse error:.*?\berror: ([^\n]+)", re.DOTALL),
        lambda found: f"a regular expression in it cannot be read: {found[1]}.",
    ),
    (
        re.compile(r"lookarounds not supported yet"),
        lambda _: (
            "a regular expression in it has an anchor or a word boundary within; only a ^ at its beginning and "
            "a $ at its end are supported."
        ),
    ),
    (re.compile(r"^Unsatisfiable schema: Regex is empty"), lambda _: "nothing can match one of its patterns."),
    (re.compile(r"^Unsatisfiable schema: anyOf is empty"), lambda _: "it has an empty list of alternatives."),
    (re.compile(r"^invalid multiple of"), lambda _: "its multipleOf must be greater than 0."),
    (
        re.compile(r"^Unknown common regex: ([^\s;]+)"),
        lambda found: f"it imports {found[1]}, which does not exist; there are common.INT, common.WORD and others.",
    ),
    (re.compile(r"^Unsatisfiable schema: ([^\n]+)"), lambda found: f"nothing can match it: {found[1]}."),
    (
        _UNENFORCED,
        lambda found: f"it uses {told(_KEYWORDS.findall(found[1]))}, which cannot be enforced.",
    ),
    (re.compile(r"^Pointer '(.*?)' does not exist"), lambda found: f"it refers to #{found[1]}, which does not exist."),
    (
        re.compile(r"^Resource '(?:json-schema:///)?(.*?)' is not present"),
        lambda found: f"it refers to {found[1]}, which is not within it; nothing is fetched.",
    ),
    (
        re.compile(r"^oneOf constraints are not supported"),
        lambda _: (
            "it has a oneOf whose branches do not exclude each other, which cannot be held to "
            '("x-guidance": {"coerce_one_of": true} takes it as anyOf).'
        ),
    ),
    (
        re.compile(r"^Token range end too large: (\d+)"),
        lambda found: f"it names token {found[1]}, which does not exist.",
    ),
    (
        re.compile(r"^unknown special token: (\"<.*?>\")"),
        lambda found: f"it names the unknown special token {found[1]}.",
    ),
    (
        re.compile(r"^unknown grammar (@\S+)"),
        lambda found: f"it refers to the grammar {found[1]}; there is no other grammar.",
    ),
    (re.compile(r'^failed to parse "(%\w+)"'), lambda found: f"what follows its {found[1]} is not valid JSON."),
    (re.compile(r"^lexer error$"), lambda _: "it cannot be read."),
    (re.compile(r"^Expected token (\S+), found '\\n'"), lambda found: f"{found[1]} is missing before the line ends."),
)


def line_of(complaint: str) -> int | None:
    """The line of the Lark source that the compiler complains about, from 1."""
    found = _PLACE.match(complaint)
    return int(found[1]) if found else None


def keywords_of(complaint: str) -> tuple[str, ...]:
    """The keywords of a JSON schema that the compiler cannot hold a text to."""
    text = _OURS.sub("", _PLACE.sub("", complaint))
    if text.startswith("oneOf"):
        return ("oneOf",)
    found = _UNENFORCED.match(text)
    return tuple(_KEYWORDS.findall(found[1])) if found else ()


def at_place(sentence: str, keywords: Sequence[str], schema: object) -> str:
    """A sentence about keywords of a schema, with the place of the first that has them."""
    place = place_of(schema, keywords) if keywords else None
    if place is None:
        return sentence
    uses = f"uses {told(keywords)}"
    return sentence.replace(uses, f"{uses} at {place or 'its top level'}", 1)


def place_in(complaint: str, num_lines: int) -> str:
    """The beginning of a sentence: where in the client's own grammar of so many lines. Empty beyond its end."""
    found = _PLACE.match(complaint)
    return f"line {found[1]}, column {found[2]}: " if found and int(found[1]) <= num_lines else ""


def sentence(complaint: str) -> str:
    """The compiler's complaint about a source, without places and our scaffolding."""
    text = _SOURCE_LINE.split(complaint.replace("<non-verbose/>", ""), maxsplit=1)[0].strip()
    text = _OURS.sub("", _PLACE.sub("", text))
    for pattern, says in _KNOWN:
        if known := pattern.search(text):
            return _short(says(known))
    if _LIMITS.match(text):
        return TOO_COMPLEX
    line = " ".join(text.split()).partition(' (at "')[0].rstrip(".")
    return _short(f"{going_on(line)}.") if line else "it cannot be compiled."


def fault_of_the_grammar(complaint: str) -> str | None:
    """The sentence about a matcher that gave up while a text was made; None if the grammar is not to blame: it was
    handed a token that it does not allow."""
    if complaint.startswith("NoExtension"):
        return DEAD_END
    return TOO_COMPLEX if _LIMITS.match(complaint) else None


def going_on(sentence: str) -> str:
    """As the second half of another sentence. Names keep their capitals."""
    word = sentence.split(" ", 1)[0]
    return sentence[0].lower() + sentence[1:] if word.capitalize() == word else sentence


def _short(text: str) -> str:
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 3] + "..."
