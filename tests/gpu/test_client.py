"""The load client in processes of its own: what they are told and say, how they end, what they are together."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from loadtest.lengths import fixed, lognormal_between
from loadtest.prompts import TokenIds
from loadtest.workloads import Workload
from tests.gpu.client import COMMAND, ROOT, ClientError, Clients, Served
from tests.gpu.client_process import Job, Report

SMALL = Workload("small", 6, 2, lognormal_between(4, 9), fixed(3))
NOBODY = "http://127.0.0.1:1"  # a port that nobody listens at
JOB = Job(NOBODY, SMALL, TokenIds(10, 20), 7)


def test_several_clients_are_one_run() -> None:
    def report(start: float, end: float, gaps: list[float], error: str = "") -> Report:
        return Report(start, end, 100, int(bool(error)), error, gaps, [0.5], 0.3)

    served = Served([report(10.0, 13.0, [0.01, 0.03]), report(11.0, 15.0, [0.02], "http 500")])
    assert served.tokens_per_s == 40.0
    assert (served.failed, served.error) == (1, "http 500")
    assert served.gap_ms(50) == pytest.approx(20.0)
    assert served.first_ms(99) == pytest.approx(500.0)


def test_a_job_is_what_it_was_on_the_other_side() -> None:
    assert Job.read(JOB.line()) == JOB


def test_client_processes_do_one_run_after_another() -> None:
    with Clients(2) as clients:
        for seed in range(3):
            served = clients.load(NOBODY, SMALL, TokenIds(10, 20), seed)
            assert (len(served.reports), served.failed, served.error) == (2, 6, "connect")


@pytest.mark.parametrize(
    ("does", "error"),
    [
        ("print('\"ready\"', flush=True); sys.exit(3)", "client process 0 .* ended with 3 before it was done"),
        ("sys.stdin.read()", r"client process 0 .* was not ready within 0\.2 s"),
    ],
)
def test_a_client_process_that_fails_is_named(does: str, error: str) -> None:
    command = (sys.executable, "-c", f"import sys; {does}")
    wait_s = 60.0 if "exit" in does else 0.2
    with Clients(1, wait_s, command) as clients, pytest.raises(ClientError, match=error):
        clients.load(NOBODY, SMALL, TokenIds(10, 20))


def test_a_client_process_ends_with_whoever_started_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        mute.settimeout(60)
        job = replace(JOB, url=f"http://127.0.0.1:{mute.getsockname()[1]}")
        process = subprocess.Popen(COMMAND, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{job.line()}\n0.0\n")
            process.stdin.flush()
            with mute.accept()[0] as peer:
                assert peer.recv(1)  # it is in the midst of a run
                process.stdin.close()
                assert process.wait(60) == 0
        finally:
            process.kill()
            process.stdout.close()


def test_client_processes_start_without_torch() -> None:
    code = "import sys, tests.gpu.client_process; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.stdout.strip() == "set()", ended.stderr
