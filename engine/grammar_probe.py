"""A process of its own that tries a grammar first. Compiling one can take minutes, gigabytes or the whole process,
and nothing in a thread can be stopped; a process can.

It is run as a script and knows nothing of the engine. Messages are frames on standard input and output: the length as
four bytes, little endian, then JSON. The first frame describes the vocabulary, each further one is a grammar with its
CPU seconds {"grammar", "cpu_s"} and is answered by the fields of `grammar_trial.Trial`.

A grammar that compiles may still meet llguidance's limits once a text is made, or a place where nothing can follow. So
some texts are begun, of tokens drawn by lot among those allowed, as a model at a high temperature would.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import sys
import time
from typing import IO, Any

NICENESS = 5  # tokens for those who wait for them come before grammars
NUM_WALKS = 2  # texts that are begun
WALK_TOKENS = 48  # of each
WALK_SHARE = 0.25  # of the CPU time a grammar has for itself, and at least
MIN_WALK_S = 0.03


class Vocabulary:
    """What masks need to know of a tokenizer, in the shape in which llguidance takes it.

    tokens: per id its bytes, b"" where it has none. eos_token_ids: not empty."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], eos_token_ids: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_ids = eos_token_ids
        self.eos_token_id = eos_token_ids[0]
        special = set(special_token_ids)
        self._ids = {token: token_id for token_id, token in enumerate(tokens) if token and token_id not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        """The longest tokens from the left: only asked for where a grammar insists that tokens be forced."""
        data, start, token_ids = text.encode(), 0, []
        while start < len(data):
            ends = range(min(len(data), start + self._longest), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is not None:
                token_ids.append(self._ids[data[start:end]])
            start = end or start + 1
        return token_ids


def limits() -> Any:
    """What a grammar may cost where llguidance counts: compiled, and per token (some 5 ms at most)."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=500,  # an object has four per optional property; time per token grows with their square
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=10_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def new_tokenizer(vocabulary: Vocabulary) -> Any:
    """llguidance's view of the vocabulary; takes some 0.1 s for 100,000 tokens."""
    from llguidance import LLTokenizer

    wrapper: Any = vocabulary  # llguidance declares a class of its own, and takes anything of its shape
    return LLTokenizer(wrapper, n_vocab=len(vocabulary.tokens), eos_token=vocabulary.eos_token_ids)


def new_matcher(tokenizer: Any, grammar: str) -> Any:
    """A matcher at the start of its text; errors are its own to tell (`get_error`)."""
    from llguidance import LLMatcher

    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits())


def read_frame(stream: IO[bytes]) -> bytes | None:
    """None at the end of the stream."""
    head = stream.read(4)
    return stream.read(int.from_bytes(head, "little")) if len(head) == 4 else None


def write_frame(stream: IO[bytes], data: bytes) -> None:
    stream.write(len(data).to_bytes(4, "little") + data)
    stream.flush()


def _num_bytes() -> int:
    """Resident; 0 where the system does not tell."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
    return 0


def _try(tokenizer: Any, vocabulary: Vocabulary, grammar: str, cpu_s: float) -> dict[str, Any]:
    """Compile, then begin some texts. The process ends at the end of the time for either, whatever it is doing."""
    before = _num_bytes()
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    matcher = new_matcher(tokenizer, grammar)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if error := matcher.get_error():
        return {"complaint": error}
    walk_s = max(MIN_WALK_S, WALK_SHARE * cpu_s)
    signal.setitimer(signal.ITIMER_PROF, 2 * walk_s)  # a single token takes less
    error, is_cut = _walk(matcher, vocabulary, walk_s)
    return {
        "complaint": error or None,
        "dead_end": error.startswith("NoExtension"),
        "num_bytes": max(0, _num_bytes() - before),
        "is_cut": is_cut,
    }


def _walk(matcher: Any, vocabulary: Vocabulary, limit_s: float) -> tuple[str, bool]:
    """Begin some texts. (what went wrong, or ""; whether there was not time enough)."""
    lots = random.Random(0)  # equal grammars meet equal fates
    ends_s = time.process_time() + limit_s
    for _ in range(NUM_WALKS):
        text = matcher.deep_copy()
        for _ in range(WALK_TOKENS):
            if time.process_time() > ends_s:
                return "", True
            if text.is_stopped():
                break
            token_id = _draw(text.compute_bitmask(), vocabulary, lots)
            if token_id is not None:
                text.consume_token(token_id)
            if text.is_error():
                return str(text.get_error()), False
            if token_id is None:
                break
    return "", False


def _draw(mask: bytes, vocabulary: Vocabulary, lots: random.Random) -> int | None:
    """Some allowed token, None if only the end is. mask: bit i of byte j allows token 8 * j + i."""
    allowed = bytearray(mask)
    for token_id in vocabulary.eos_token_ids:
        allowed[token_id // 8] &= ~(1 << token_id % 8)
    start = lots.randrange(len(allowed))
    for first, part in ((start, allowed[start:]), (0, allowed[:start])):
        rest = part.lstrip(b"\0")
        if rest:
            byte = first + len(part) - len(rest)
            return 8 * byte + lots.choice([bit for bit in range(8) if allowed[byte] >> bit & 1])
    return None


def _try_apart(tokenizer: Any, vocabulary: Vocabulary, grammar: str, cpu_s: float) -> dict[str, Any]:
    """In a process whose heap no other grammar has used, so that what this one takes can be told."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with open(writing, "wb") as sink:
            sink.write(json.dumps(_try(tokenizer, vocabulary, grammar, cpu_s)).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as source:
        answer = source.read()
    _, status = os.waitpid(child, 0)
    if status == 0:
        return dict(json.loads(answer))
    return {"exceeded": os.waitstatus_to_exitcode(status) != -signal.SIGKILL}


def main() -> None:
    """Serve frames until standard input ends. argv: CPU seconds for its own start, bytes of memory."""
    cpu_s, memory = float(sys.argv[1]), int(sys.argv[2])
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not end up in a frame
    frame = read_frame(source)
    if frame is None:
        return
    described = json.loads(frame)
    tokens = [bytes.fromhex(token) for token in described["tokens"]]
    vocabulary = Vocabulary(tokens, described["special_token_ids"], described["eos_token_ids"])
    tokenizer = new_tokenizer(vocabulary)
    simple = json.dumps({"grammars": [{"lark_grammar": 'start: "a"'}]})
    _try(tokenizer, vocabulary, simple, cpu_s)  # what is made once is not counted
    signal.setitimer(signal.ITIMER_PROF, 0)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    base = _try_apart(tokenizer, vocabulary, simple, cpu_s).get("num_bytes", 0)  # of the new process itself
    while (frame := read_frame(source)) is not None:
        asked = json.loads(frame)
        answer = _try_apart(tokenizer, vocabulary, asked["grammar"], asked["cpu_s"])
        if "num_bytes" in answer:
            answer["num_bytes"] = max(0, answer["num_bytes"] - base)
        write_frame(sink, json.dumps(answer).encode())


if __name__ == "__main__":
    main()
