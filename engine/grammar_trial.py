"""The server's end of the process that tries grammars (`grammar_probe.py`)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import dataclass

from engine import grammar_probe
from engine.outputs import QueueFull

PROBE_MEMORY = 2 << 30  # address space of a trying process
WALL_FACTOR = 10  # wall clock per CPU second: the process may have to wait for a core


@dataclass(frozen=True, slots=True)
class Trial:
    """complaint: the compiler's own words, or None. dead_end: it is about a text that could not go on, not about the
    grammar as it stands. num_bytes: what the compiled grammar takes. is_cut: no time was left for all texts that are
    begun. exceeded: it came to its bound in time or memory;
    False with nothing else said: somebody else ended it."""

    complaint: str | None = None
    dead_end: bool = False
    num_bytes: int = 0
    is_cut: bool = False
    exceeded: bool | None = None


class Probe:
    """The process that tries grammars for one worker thread; started when needed, and again after it was killed."""

    def __init__(self, vocabulary: grammar_probe.Vocabulary, cpu_s: float) -> None:
        self._cpu_s = cpu_s
        self._first_frame = json.dumps(
            {
                "tokens": [token.hex() for token in vocabulary.tokens],
                "special_token_ids": vocabulary.special_token_ids,
                "eos_token_ids": vocabulary.eos_token_ids,
            }
        ).encode()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, source: str, cpu_s: float) -> Trial:
        """Raises QueueFull where the machine, not the grammar, is to blame: no process can be started, or it got no
        time, or it was ended twice."""
        for _ in range(2):
            trial = self._ask(source, cpu_s)
            if trial is not None and trial.exceeded is not False:
                return trial
        raise QueueFull("This grammar could not be tried. Please try again later.")

    def _ask(self, source: str, cpu_s: float) -> Trial | None:
        """None if the process has ended."""
        try:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
        except OSError as error:
            self.kill()
            raise QueueFull("No process can be started for this grammar. Please try again later.") from error
        frame = None
        with contextlib.suppress(OSError, ValueError):  # it has ended, or `close` has ended it
            asked = {"grammar": source, "cpu_s": cpu_s}
            grammar_probe.write_frame(process.stdin, json.dumps(asked).encode())
            if not _readable(process.stdout.fileno(), WALL_FACTOR * self._cpu_s):
                self.kill()
                raise QueueFull("This grammar waited too long for a processor. Please try again later.")
            frame = grammar_probe.read_frame(process.stdout)
        if not frame:
            self.kill()
            return None
        return Trial(**json.loads(frame))

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.kill()
            self._process = subprocess.Popen(
                [sys.executable, "-P", grammar_probe.__file__, str(self._cpu_s), str(PROBE_MEMORY)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={
                    **_environment(),
                    "RAYON_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
                start_new_session=True,  # Ctrl-C is for the server
            )
            assert self._process.stdin is not None
            grammar_probe.write_frame(self._process.stdin, self._first_frame)
        return self._process

    def kill(self) -> None:
        """End the process, if there is one. Safe from any thread."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the one that it has made
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # what it never read is still to be flushed
                        pipe.close()


def _environment() -> dict[str, str]:
    """What a Python needs to run; no keys and settings of the server."""
    return {
        name: value for name, value in os.environ.items() if name.startswith(("PATH", "LANG", "LC_", "LD_", "PYTHON"))
    }


def _readable(descriptor: int, timeout_s: float) -> bool:
    """Any descriptor, also one beyond those that `select` takes: a server has one per connection."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(1000 * timeout_s))
