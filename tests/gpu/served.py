"""The server over HTTP, Llama-3-8B's shape with dummy weights: output tokens per second at 256 and 64 streams, and how
long streams wait while prompts are computed beside them.

    python -m tests.gpu.served [--out FOLDER] [--dry]

The aim at saturation, 12,500 tokens/s, is vLLM's public figure for Llama-3.1-8B in bfloat16 on one H100 (SGLang's is
16,200): another chip and another workload, so a bar and no comparison.
"""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from loadtest.lengths import fixed, lognormal_between, parse_lengths
from loadtest.prompts import TokenIds
from loadtest.servers import free_port
from loadtest.workloads import NAMED, PlannedRequest, Workload
from tests.gpu.client import Clients, Served, divided
from tests.gpu.client_process import MODEL
from tests.gpu.place import Place, open_place

SATURATION_AIM = 12_500.0  # output tokens per second
READY_S, DRY_READY_S = 120.0, 1000.0  # a dry run may have a busy machine
CLIENTS = 4  # processes
W5 = NAMED["W5"]
# Lengths that differ, as "medium" of loadtest/ratio.py.
MEDIUM = Workload("medium", 512, 256, lognormal_between(32, 512), lognormal_between(16, 256))
MIXED = Workload("mixed prefill", 128, 64, parse_lengths("uniform:64:4000"), fixed(128))


def w5(concurrency: int) -> Workload:
    """Four times as many requests as streams, as W5 has it."""
    return replace(W5, num_sessions=4 * concurrency, concurrency=concurrency)


WORKLOADS = {"W5 x 256": w5(256), "W5 x 64": W5, "medium x 256": MEDIUM, "mixed prefill x 64": MIXED}
AIMS = {"W5 x 256": SATURATION_AIM}


def seed_of(name: str) -> int:
    return list(WORKLOADS).index(name)


def source_of(place: Place) -> TokenIds:
    return TokenIds(*place.sized((1000, 100_000), (10, 400)))


def requests_of(place: Place, name: str) -> list[PlannedRequest]:
    """What the client processes send, all of them together."""
    workload = place.sized(WORKLOADS[name], tiny(WORKLOADS[name]))
    parts = divided(workload, place.sized(CLIENTS, 2), seed_of(name))
    return [session.turns[0] for part, seed in parts for session in part.build(seed, source_of(place))]


def tiny(workload: Workload) -> Workload:
    return replace(workload, num_sessions=8, concurrency=4, prompt_len=fixed(8), output_len=fixed(6))


def server_words(place: Place, port: int) -> list[str]:
    words = [sys.executable, "-m", "server", "serve", str(place.model), "--served-model-name", MODEL]
    words += ["--load-format", "dummy", "--dtype", "bfloat16", "--device", place.device, "--port", str(port)]
    if place.is_dry:
        return [*words, "--kv-cache-memory", "16MiB", "--num-threads", "1"]
    return [*words, "--config", "config/h200.toml"]


@contextmanager
def serving(place: Place) -> Iterator[str]:
    """The URL of a server that is ready. It lives in this process group, so whoever kills the stage kills it too."""
    port, begun = free_port(), time.perf_counter()
    url, limit = f"http://127.0.0.1:{port}", place.sized(READY_S, DRY_READY_S)
    with (place.results.folder / "server.log").open("ab") as log:
        process = subprocess.Popen(server_words(place, port), stdout=log, stderr=log)
    try:
        while not is_ready(url):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with {process.returncode}: see {log.name}")
            if time.perf_counter() - begun > limit:
                raise RuntimeError(f"the server was not ready within {limit:.0f} s: see {log.name}")
            time.sleep(0.1)
        place.results.tell("from start to ready", time.perf_counter() - begun, "s")
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_ready(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def run(place: Place, clients: Clients, url: str, workload: Workload, seed: int) -> Served:
    return clients.load(url, place.sized(workload, tiny(workload)), source_of(place), seed)


def tell(place: Place, name: str, served: Served, aim: float | None = None) -> None:
    note = f"TTFT p50 {served.first_ms(50):.0f} ms, p99 {served.first_ms(99):.0f}"
    note += f", client {served.client_share:.0%} of a core"
    if served.failed:
        note = f"{served.failed} FAILED: {served.error[:80]}; {note}"
    place.results.tell(name, served.tokens_per_s, "tok/s", aim=aim, note=note)
    gaps = [f"p{percent} {gap:.1f}" for percent in (50, 90) if math.isfinite(gap := served.gap_ms(percent))]
    place.results.tell(f"{name}: ITL p99", served.gap_ms(99), "ms", note=", ".join(gaps))


def main() -> int:
    place = open_place("served", __doc__)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # the time is up: end the server, too
    failed = 0
    with Clients(place.sized(CLIENTS, 2)) as clients, serving(place) as url:
        warm_up = replace(w5(256), num_sessions=256, output_len=fixed(16))
        run(place, clients, url, warm_up, 99)  # what is made late is made now
        for name, workload in WORKLOADS.items():
            served = run(place, clients, url, workload, seed_of(name))
            tell(place, f"served {name}", served, None if place.is_dry else AIMS.get(name))
            failed += served.failed
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
