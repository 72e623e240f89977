"""Grammars: from what a text must match to matchers that tell which tokens may follow.

A grammar comes from a stranger, and compiling one can take any time and memory. So each is tried first in a process
of its own, bounded in CPU time and memory (`grammar_probe.py`), and compiled here, in a worker thread, only when it
passed (`grammar_queue.py` says when). Neither the event loop nor the engine thread ever compiles. Results, refusals
included, are kept: equal grammars are compiled once. llguidance is imported with the first grammar, not before.

`compile`, `acquire` and `release` run on the event loop; `matcher` and `compute` on the engine thread.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engine import grammar_probe
from engine.config import StructuredConfig
from engine.grammar_complaints import DEAD_END, at_place, going_on, keywords_of, line_of, place_in, sentence
from engine.grammar_queue import SLICES, CompileQueue
from engine.grammar_source import to_llguidance
from engine.grammar_trial import Probe
from engine.outputs import NotServing, QueueFull
from engine.sampling_params import InvalidParameter, StructuredOutput, UnusableForm
from engine.tokenizer import Tokenizer

logger = logging.getLogger("pagemill.engine")

MAX_CACHED = 1024  # grammars and refusals, whatever their size
MIN_BYTES = 64 << 10  # what the smallest grammar is taken to occupy


@dataclass(slots=True)
class Grammar:
    """One compiled grammar, or the reason why there is none. place, line, keywords: see UnusableForm.

    matcher: at the start of its text, only ever copied; copies share what the lexer has learned, its limits too.
    num_users: streams that hold it. spent: those limits are reached; the next request has it compiled anew."""

    matcher: Any = None
    error: str = ""
    place: str = ""
    line: int | None = None
    keywords: tuple[str, ...] = ()
    num_bytes: int = MIN_BYTES
    num_users: int = 0
    spent: bool = False


class GrammarStore:
    """One model's grammars. vocab_size: ids that may be sampled, the length of a mask."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int], config: StructuredConfig
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.config = config
        self._text_tokenizer = tokenizer
        self._grammars: OrderedDict[StructuredOutput, Grammar] = OrderedDict()  # least recently used first
        self._num_bytes = 0
        self._queue = CompileQueue(self._work, config.compile_timeout_s, self._keep)
        self._workers = threading.local()
        self._probes: list[Probe] = []
        self._closed = False
        self._lock = threading.Lock()
        self._vocabulary: grammar_probe.Vocabulary | None = None
        self._tokenizer: Any = None
        self._towards: dict[bytes, list[int]] = {}  # by what is left of a mark: a handful of texts

    # -- on the event loop

    async def compile(self, structured: StructuredOutput, client: str = "") -> bool:
        """Make the grammar ready; True if it was. client: who asks, as far as that is known.

        Raises UnusableForm under the name of the field that it came from, QueueFull when too many are being compiled
        or held."""
        grammar = self._grammars.get(structured)
        if ready := grammar is not None and not grammar.spent:
            self._grammars.move_to_end(structured)
        else:
            grammar = await self._compiled(structured, client)
        if grammar.error:
            raise UnusableForm(
                structured.param, grammar.error, place=grammar.place, line=grammar.line, keywords=grammar.keywords
            )
        return ready

    async def _compiled(self, structured: StructuredOutput, client: str) -> Grammar:
        size = len((structured.source + structured.calls).encode(errors="replace"))
        if size > self.config.max_grammar_bytes:
            limits = f"at most {self.config.max_grammar_bytes} are allowed"
            raise InvalidParameter(structured.param, f"{structured.param} has {size} bytes; {limits}.")
        grammar = await self._queue.compiled(structured, client)
        if not grammar.error and structured not in self._grammars:
            raise QueueFull("Too many grammars are in use. Please try again later.")
        return grammar

    def _keep(self, structured: StructuredOutput, grammar: Grammar) -> None:
        grammar.num_bytes = max(grammar.num_bytes, 2 * len(structured.source))  # it is the key too
        if (spent := self._grammars.pop(structured, None)) is not None:
            grammar.num_users = spent.num_users
            self._num_bytes -= spent.num_bytes
        self._grammars[structured] = grammar
        self._num_bytes += grammar.num_bytes
        for key, old in list(self._grammars.items()):
            if self._num_bytes <= self.config.cache_bytes and len(self._grammars) <= MAX_CACHED:
                break
            if old.num_users == 0:
                del self._grammars[key]
                self._num_bytes -= old.num_bytes

    def acquire(self, structured: StructuredOutput) -> None:
        """A stream will use the grammar: it stays until `release`. Raises QueueFull if it is not there (any more)."""
        grammar = self._grammars.get(structured)
        if grammar is None or grammar.error or grammar.spent:
            raise QueueFull("The grammar of this request is not ready. Please try again.")
        grammar.num_users += 1

    def release(self, structured: StructuredOutput) -> None:
        self._grammars[structured].num_users -= 1

    def close(self) -> None:
        """End the processes; what is being compiled is refused."""
        self._closed = True
        self._queue.close()
        for probe in self._probes:
            probe.kill()

    # -- in a worker thread

    def _work(self, structured: StructuredOutput, cpu_s: float) -> Grammar | None:
        """None if it takes more than `cpu_s` and may take more."""
        started = time.monotonic()
        try:
            source = to_llguidance(structured)
        except ValueError as error:
            return Grammar(error=going_on(str(error)))
        trial = self._probe().ask(source, cpu_s)
        if self._closed:
            raise NotServing("The server is shutting down.")
        if trial.exceeded:
            if cpu_s < self.config.compile_timeout_s:
                return None
            limit = f"{self.config.compile_timeout_s:g} seconds"
            return Grammar(error=f"it takes more than {limit} or too much memory to compile.")
        if trial.complaint is not None:
            return _refused(structured, source, DEAD_END if trial.dead_end else "", trial.complaint)
        if trial.is_cut and cpu_s < min(SLICES[-1][0], self.config.compile_timeout_s):
            return None
        if trial.num_bytes > self.config.cache_bytes:
            return Grammar(error="it takes too much memory.")
        matcher = grammar_probe.new_matcher(self._tokenizer, source)
        logger.debug("a grammar of %d characters took %.3f s", len(source), time.monotonic() - started)
        if matcher.is_error():
            return _refused(structured, source, "", matcher.get_error())
        return Grammar(matcher, num_bytes=max(MIN_BYTES, trial.num_bytes, 8 * len(source)))

    def _probe(self) -> Probe:
        """This worker thread's own."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._describe()
                self._tokenizer = grammar_probe.new_tokenizer(self._vocabulary)
        probe: Probe | None = getattr(self._workers, "probe", None)
        if probe is None:
            probe = self._workers.probe = Probe(self._vocabulary, self.config.compile_timeout_s)
            self._probes.append(probe)
        return probe

    def _describe(self) -> grammar_probe.Vocabulary:
        """Without an end-of-sequence id there is one more token, which nobody can sample, to take its place."""
        text = self._text_tokenizer
        ids = range(self.vocab_size)
        tokens = [text.token_bytes(i) for i in ids]
        special = [i for i in ids if text.is_special(i)]
        if self.eos_token_ids:
            return grammar_probe.Vocabulary(tokens, special, list(self.eos_token_ids))
        return grammar_probe.Vocabulary([*tokens, b"<end>"], [*special, len(tokens)], [len(tokens)])

    # -- on the engine thread

    @property
    def mask_size(self) -> int:
        """Bits of a mask: one per id, and one for the end where the model has none."""
        assert self._vocabulary is not None, "a grammar was compiled"
        return len(self._vocabulary.tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self._text_tokenizer.token_bytes(token_id)

    def spell(self, data: bytes) -> list[int]:
        """Some tokens whose bytes, joined, are `data`."""
        assert self._vocabulary is not None
        return self._vocabulary(data.decode("utf-8", "replace"))

    @cached_property
    def line_breaks(self) -> list[int]:
        """Ids that stand for one or two line breaks and nothing else."""
        assert self._vocabulary is not None
        return [i for i, token in enumerate(self._vocabulary.tokens[: self.vocab_size]) if token in (b"\n", b"\n\n")]

    def tokens_towards(self, text: bytes) -> list[int]:
        """Ids whose bytes begin `text`, or begin with it."""
        if text not in self._towards:
            assert self._vocabulary is not None
            pairs = enumerate(self._vocabulary.tokens[: self.vocab_size])
            self._towards[text] = [i for i, t in pairs if t and (text.startswith(t) or t.startswith(text))]
        return self._towards[text]

    def matcher(self, structured: StructuredOutput) -> Any:
        """A fresh matcher at the start of its text. Raises LookupError if nobody holds the grammar."""
        grammar = self._grammars.get(structured)
        if grammar is None or grammar.matcher is None:
            raise LookupError("the grammar is gone")
        return grammar.matcher.deep_copy()

    def spend(self, structured: StructuredOutput) -> None:
        """A copy of its matcher met a limit; copies share it, so that the next text needs another matcher."""
        grammar = self._grammars.get(structured)
        if grammar is not None:
            grammar.spent = True


def _refused(structured: StructuredOutput, source: str, error: str, complaint: str) -> Grammar:
    """source: what the compiler complains about. error: what to say, "" for the complaint in other words."""
    num_lines = structured.source.count("\n") + 1 if structured.kind == "lark" else 0
    place = "" if error else place_in(complaint, num_lines)
    error = error or sentence(complaint)
    keywords, line = keywords_of(complaint), _line(structured, source, complaint)
    if structured.kind == "json" and line is None:
        error = at_place(error, keywords, json.loads(structured.source))
    return Grammar(error=error, place=place, line=line, keywords=keywords)


def _line(structured: StructuredOutput, source: str, complaint: str) -> int | None:
    """In the client's own grammar, or in that of its calls."""
    line = line_of(complaint)
    if line is None or structured.kind == "lark" or not structured.calls:
        return line if structured.kind == "lark" else None
    lark: str = json.loads(source)["grammars"][0]["lark_grammar"]
    before = lark.count("\n") - structured.calls.count("\n") - 1  # one line of options is at the end
    return line - before if line > before else None
