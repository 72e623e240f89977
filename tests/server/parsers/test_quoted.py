"""Patterns and grammars for texts inside JSON strings, asked with the compiler that the engine uses: a quoted text
matches just when the text matches."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import pytest

from engine.grammar_probe import Vocabulary, new_matcher, new_tokenizer
from engine.grammar_source import to_llguidance
from engine.sampling_params import StructuredOutput
from server.parsers.quoted_grammar import quoted_grammar
from server.parsers.quoted_pattern import Unquotable, quoted

BYTES = Vocabulary([*(bytes([i]) for i in range(256)), b"<end>"], [256], [256])
LETTERS = 'a"\\\nbN\t x\x01é/.]-A1\r\x7f😀'


@cache
def tokenizer() -> Any:
    return new_tokenizer(BYTES)


def matcher_of(lark: str) -> Any:
    return new_matcher(tokenizer(), to_llguidance(StructuredOutput("lark", lark)))


def accepts(matcher: Any, text: str) -> bool:
    ids = list(text.encode())
    matcher = matcher.deep_copy()
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def inside(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_inside(text: str) -> bool:
    try:
        json.loads(f'"{text}"')
    except ValueError:
        return False
    return True


def texts(seed: int, letters: str = LETTERS) -> list[str]:
    lots = random.Random(seed)
    pairs = [a + b for a in letters for b in letters]
    return [*letters, *pairs, *("".join(lots.choices(letters, k=lots.randint(3, 7))) for _ in range(300))]


# -- patterns -----------------------------------------------------------------------------------------------------

PATTERNS = [
    r'a"b\\c\n', r'[^a"]+', r".{1,3}", r"(?s).{2}", r"(?s:.)\.", r"(?-s:.)(?s).", r"[\x00-\x2f\]]+", r"\S\s\d\D\w\W",
    r"[\s&&[^\n]]+x", r"[\S--a]+", r'["\n~~\na]', r'[]a"]+', r'[^]"]', r"[+-\\]+", r"[[:punct:]]+", r"[[:^alpha:]a]",
    r"[[:space:]]", r"[:a]+", r"\p{L}\P{L}", r'\p{Cc}"?', r"\pC", r"[\p{P}\x01]+", r'(?i)n\nN"',
    r'[-"]|[a-]', r"\u000a\x{22}", r'(?P<x>a|"){2}', r'(?<x>a|"){2}', r"(?i:[\n-\\])+", r"é日?[^é]", r'\/"\/',
    r'[^\\"]*', r"[^\x7f]", r'(a|b|"|\\){2,4}', r"\t\r\f\v\a", r'(?m)"', "a\n\"", "[^\x00-\x1f]+", r'["-"]a',
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_quoted_text_matches_just_when_the_text_does(pattern: str) -> None:
    slashed = pattern.replace("\n", r"\n")
    plain, within = matcher_of(f"start: /{slashed}/"), matcher_of(f"start: /{quoted(slashed)}/")
    assert not plain.get_error()
    assert not within.get_error()
    found = 0
    for text in [*texts(1), 'a"b\\c\n', 'n\nN"', '/"/', "\t\r\f\v\a", 'a\n"', "é日x"]:
        matches = accepts(plain, text)
        found += matches
        assert accepts(within, inside(text)) == matches, text
        if not is_inside(text):
            assert not accepts(within, text), "no bare quote, backslash or control character"
    assert found or pattern == r"\S\s\d\D\w\W"


def test_flags_stand_for_the_whole_pattern() -> None:
    dots = matcher_of(f"start: /{quoted('a.', 'is')}/is")
    assert accepts(dots, r"A\n")
    assert not accepts(dots, r"A\N")


@pytest.mark.parametrize(
    "pattern", ["[", "[a", "[a-", "[^", "(", ")", "a)", "\\", r"[\x", r"\x{110000}", "[z-a", "[[:alpha:", "(?", "(?P<"]
)
def test_what_is_no_pattern_stays_none(pattern: str) -> None:
    assert matcher_of(f"start: /x{quoted(pattern)}/").get_error()


@pytest.mark.parametrize("pattern", ["(?x)a b", r"\p{Greek}", "[" * 50 + "a" + "]" * 50, "(?i-u:a)"])
def test_what_cannot_be_quoted_is_said(pattern: str) -> None:
    with pytest.raises(Unquotable, match=r"^has a "):
        quoted(pattern)


# -- grammars -----------------------------------------------------------------------------------------------------

PATCH = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
%import common.LF
"""
# grammar -> a pattern of Python for the same texts
GRAMMARS: dict[str, str] = {
    'start: "a\\n" "b"+': r"a\nb+",
    'start: x | "\\\\"\nx: /[^a"]/ "a"? // "comment"': r'[^a"]a?|\\',
    '?start: x{2,3}\n!x: "\\""i | /\\n/i -> nothing\n  | A\n# comment\nA: "aN\\n"i': r'(?:"|\n|[aA][nN]\n){2,3}',
    'start: A*\nA: "\\x41" | "\\"".."]"': r'(?:A|["-\]])*',
    'start: [A] "b"\nA.: "a"'.replace(".", ""): r"a?b",
    'start: "a" b\nb: "\\n"\n%ignore /[ \\t]/\n%ignore "x"': r"a(?:[ \t]|x)*\n(?:[ \t]|x)*",
    'start: /a/ WS "b" NEWLINE\n%import common (WS, NEWLINE)': r"a[ \t\f\r\n]+b(?:\r?\n)+",
    'start: S\n%import common.ESCAPED_STRING -> S\n': r'"(?:[^"\\]|\\.)*"',
    'start: "a" | start "b"': r"ab*",  # refers to itself
    'start: "(" start? ")" | "\\n" | "\\""': r'\(*(?:\n|"|\(\))\)*',
    'start: "a" (start | %lark {\nstart: "b\\n"\n})': r"a+b\n",
    'start: "(" start* ")" | S\n%import common.ESCAPED_STRING -> S\n%import common.WS\n%ignore WS # blanks': (
        r'[()"ab \t\n\\N]*'
    ),
    'start: "a" start? "b" | "x"\n%ignore /[ \\n]+/\n': r"[abx \n]*",
    'x[lazy]: /a\\n+/\nstart: x "b"': r"a\nb",
    'start: %regex {"substring_words": "a b"} "\\n"\n%llguidance {}': r"(?:a|a |a b| b|b| )?\n",
}  # fmt: skip


@pytest.mark.parametrize("source", GRAMMARS)
def test_a_quoted_text_is_of_the_grammar(source: str) -> None:
    plain, within = matcher_of(source), matcher_of(f"start: %lark {{\n{quoted_grammar(source)}\n}}")
    assert not plain.get_error()
    assert not within.get_error()
    pattern = re.compile(GRAMMARS[source], re.ASCII)
    found = 0
    letters = 'a"\\\nbN\t xA' if "(" not in GRAMMARS[source] or "start?" not in source else '(\n")'
    for text in [*texts(2, letters), "ab\n", "a \n", "a x\n", "a \nb\r\n", '"a\\""', "aab\n", "ba", "AAN\n", "a\nb"]:
        matches = accepts(within, inside(text))
        found += matches
        if matches and "start?" not in source:
            assert pattern.fullmatch(text), text
        if accepts(plain, text):
            assert matches, text
    assert found


def test_lines_of_a_patch_end() -> None:
    """Where a line may go on with an escaped quote, the compiler's lexer would never find the escaped line break."""
    within = matcher_of(f"start: %lark {{\n{quoted_grammar(PATCH)}\n}}")
    good = '*** Begin Patch\n*** Add File: "a"\n+print("\\n")\n+\n*** Delete File: b\\\n*** End Patch\n'
    assert accepts(matcher_of(PATCH), good)
    assert accepts(within, inside(good))
    for cut in (good[1:], good.replace("+print", "print"), good.replace("Delete File: b\\\n", "")):
        assert not accepts(within, inside(cut))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("start: <|im_end|>", "special token <|im_end|>"),
        ('start: "a" <[3]>', "special token"),
        ('start: %json {"type": "string"}', "has a %json"),
        ('start: S\nS: %regex {"substring_chars": "a\\nb"}', "has a %regex with escaped characters"),
        ("start: /(?x) a/", "the flag x"),
        ('start: "(" start ")" | /.*/ "\\n"', "refer to themselves"),
        ('start: "(" start ")" | S T\nS: "a" "\\n"*\nT: "\\t"*', "refer to themselves"),
        ('start: "(" start ")" | S\nS: "a" "\\n"*\n%import common.WS\n%ignore WS "b"', "refer to themselves"),
    ],
)
def test_what_no_quoting_can_keep_is_said(source: str, words: str) -> None:
    with pytest.raises(Unquotable, match=re.escape(words)):
        quoted_grammar(source)


@pytest.mark.parametrize("source", ["", "start", "start: (", 'start: "a', "start: b", 'x: "a"', "start: /(/", "%json"])
def test_what_is_no_grammar_stays_none(source: str) -> None:
    try:
        within = quoted_grammar(source)
    except Unquotable:
        return
    assert matcher_of(f"start: %lark {{\n{within}\n}}").get_error()
