"""Against a server whose delays are known: what is measured is what the server did."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest

from loadtest import cli, cli_run
from loadtest.arrivals import arrival_times
from loadtest.client import Target
from loadtest.lengths import UsageError, fixed
from loadtest.load import run_load
from loadtest.measure import Plan, measure
from loadtest.prompts import TokenIds, Words
from loadtest.record import RequestRecord
from loadtest.summary import summarise
from loadtest.table import error_lines, result_table
from loadtest.trace import TraceRequest, read_trace, trace_sessions, write_trace
from loadtest.transport import RawTransport, Transport
from loadtest.transport_httpx import HttpxTransport
from loadtest.workloads import NAMED, Workload

from .fake_server import FakeServer

SMALL = Workload("small", 6, 2, fixed(5), fixed(8))


async def run(
    server: FakeServer, workload: Workload, target: Target | None = None, *, arrivals: tuple[float, ...] = (),
    transport: Transport | None = None,
) -> list[RequestRecord]:  # fmt: skip
    transport = transport or RawTransport(server.url)
    sessions = workload.build(0, Words(), arrivals)
    result = await run_load(
        transport, target or Target("fake"), sessions, concurrency=None if arrivals else workload.concurrency
    )
    await transport.close()
    return result.records


@pytest.mark.parametrize(("through", "tolerance"), [(RawTransport, 1e-3), (HttpxTransport, 4e-3)])
@pytest.mark.parametrize("n", [1, 3])
async def test_latencies_are_the_servers_to_the_millisecond(
    n: int, through: type[Transport], tolerance: float
) -> None:
    """The server stamps each token as it writes it; the client must see the same gaps. Medians are compared, since
    another process may hold the core between a write and its arrival. httpx itself takes a millisecond."""
    async with FakeServer(first_s=0.02, gap_s=0.006).start() as server:
        workload = Workload("w", 8, 2, fixed(5), fixed(12), n=n, temperature=1.0)
        records = await run(server, workload, transport=through(server.url))
    assert not any(record.error for record in records)
    seeds = [session.turns[0].seed for session in workload.build(0, Words())]
    served = {request.body["seed"]: request for request in server.served}
    assert served.keys() == set(seeds)
    ttft_errors, gap_errors, e2e_errors = [], [], []
    for record in records:
        truth = served[seeds[record.index]].sent_s
        first = min(moments[0] for moments in truth.values())
        assert record.ttft_s is not None
        assert record.ttft_s >= 0.02
        ttft_errors.append(record.ttft_s - (first - record.scheduled_s))
        e2e_errors.append(record.e2e_s - (max(moments[-1] for moments in truth.values()) - record.scheduled_s))
        assert record.output_tokens == 12 * n
        assert set(record.token_times) == set(range(n))
        for index, moments in truth.items():
            gap_errors += list(np.diff(record.token_times[index]) - np.diff(moments))
    assert abs(np.median(ttft_errors)) < tolerance
    assert abs(np.median(e2e_errors)) < tolerance
    assert abs(np.median(gap_errors)) < tolerance
    assert abs(np.mean(gap_errors)) < tolerance


async def test_open_loop_does_not_wait_for_the_server() -> None:
    """A server that takes one request at a time and 40 ms for it gets 100 requests a second: the requests still leave
    at their times, and the latencies grow by what the queue costs (no coordinated omission)."""
    async with FakeServer(first_s=0.02, gap_s=0.02, slots=1).start() as server:
        count, rate = 30, 100.0
        times = arrival_times("constant", rate, count, seed=0)
        records = await run(server, Workload("w", count, 1, fixed(5), fixed(2)), arrivals=times)
    sent = np.array([record.sent_s - records[0].scheduled_s for record in records])
    assert np.median(np.abs(sent - np.array(times))) < 5e-3, "sent when due"
    assert sent[-1] < 2 * times[-1], "though the server needs four times as long"
    waits = np.array([record.e2e_s for record in records])
    queue = np.arange(count) * (0.04 - 1 / rate) + 0.04  # service time 40 ms, one after another
    assert (waits > 0.9 * queue).all()
    assert records[-1].scheduled_s - records[0].scheduled_s == pytest.approx(times[-1])


async def test_latency_counts_from_the_due_time_when_the_client_is_late() -> None:
    """A client that stalls must charge the stall to itself, not hide it."""
    async with FakeServer(first_s=0.0, gap_s=0.0).start() as server:
        transport = RawTransport(server.url)
        sessions = Workload("w", 3, 1, fixed(5), fixed(1)).build(0, Words(), (0.0, 0.01, 0.02))

        class Stalling(Target):
            def body(self, request, history=()):
                end = perf_counter() + 0.05
                while perf_counter() < end:
                    pass
                return Target.body(self, request, history)

        result = await run_load(transport, Stalling("fake"), sessions, concurrency=None)
        await transport.close()
    last = result.records[-1]
    assert last.sent_s - last.scheduled_s > 0.05
    assert last.e2e_s > 0.05
    assert last.ttft_s is not None
    assert last.ttft_s > 0.05


async def test_closed_loop_keeps_exactly_its_concurrency() -> None:
    async with FakeServer(first_s=0.01, gap_s=0.002).start() as server:
        records = await run(server, Workload("w", 12, 3, fixed(5), fixed(4)))
    moments = sorted(
        [(request.received_s, 1) for request in server.served]
        + [(request.finished_s, -1) for request in server.served]
    )
    running = np.cumsum([change for _, change in moments])
    assert 3 <= running.max() <= 4, "the fourth may arrive before the server has noted the end of the first"
    assert [record.index for record in records] == list(range(12))


async def test_chat_conversation_carries_the_real_answers() -> None:
    async with FakeServer(first_s=0.0, gap_s=0.0).start() as server:
        workload = Workload("w", 2, 1, fixed(3), fixed(2), turns=fixed(3))
        records = await run(server, workload, Target("fake", "chat"))
        completions = await run(server, workload, Target("fake"))
    assert [record.turn for record in records] == [0, 1, 2, 0, 1, 2]
    messages = server.served[2].body["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant", "user"]
    assert messages[1]["content"] == " a a"
    assert messages[0]["content"] == server.served[0].body["messages"][0]["content"]
    assert server.served[8].body["prompt"].startswith(server.served[7].body["prompt"])
    assert not any(record.error for record in records + completions)


async def test_plain_answers_have_no_first_token() -> None:
    async with FakeServer().start() as server:
        records = await run(server, SMALL, Target("fake", stream=False))
    assert all(record.ttft_s is None and record.output_tokens == 8 and not record.error for record in records)
    assert all(record.texts == {0: " a" * 8} for record in records)


async def test_errors_are_counted_and_do_not_stop_the_run() -> None:
    async with FakeServer(statuses=[500, 429, 500]).start() as server:
        records = await run(server, SMALL)
    assert sorted(record.error for record in records) == ["", "", "", "http 429", "http 500", "http 500"]
    summary = summarise(records)
    assert summary["error_examples"]["http 500"] == '{"error": {"message": "no", "type": "x"}}'
    assert 'error      2 x http 500, such as {"error"' in "\n".join(error_lines(summary))
    async with FakeServer(cut_after=3).start() as server:
        records = await run(server, SMALL)
    assert {record.error for record in records} == {"connection lost"}


async def test_measure_reads_the_servers_own_metrics() -> None:
    async with FakeServer(first_s=0.02, gap_s=0.002).start() as server:
        transport = RawTransport(server.url)
        plan = Plan(SMALL.build(0, TokenIds()), 2, {"workload": "small"}, SMALL.build(1, TokenIds())[:2])
        result = await measure(transport, Target("fake"), plan, sample_interval_s=0.02, keep_records=True)
        await transport.close()
    assert len(server.served) == 8, "two for warming up"
    assert result["requests"]["completed"] == len(result["records"]) == 6
    assert result["server"]["live_slot_utilization"] == pytest.approx(15 / 16)
    assert result["server"]["deltas"]["generation_tokens_total"] == 48, "the warm-up is not counted"
    assert result["server"]["num_requests_running"]["max"] >= 1
    assert len(result["series"]) >= 3
    assert result["client"]["cpu_us_per_token"] > 0
    json.dumps(result)
    assert "48 output" in result_table(result)


async def test_same_seed_same_requests() -> None:
    for workload in NAMED.values():
        small = workload.scaled(0.01)
        assert small.build(3, Words()) == small.build(3, Words())
        assert small.build(3, Words()) != small.build(4, Words())
    shared = NAMED["W3"].build(0, TokenIds())
    assert len({session.turns[0].prompt[:1024] for session in shared}) == 1
    assert len({session.turns[0].prompt for session in shared}) == 100
    lengths = [len(session.turns[0].prompt) for session in NAMED["W2"].build(0, TokenIds())]
    assert min(lengths) >= 32
    assert max(lengths) <= 512
    assert NAMED["W5"].scaled(0.001).num_sessions == 64, "never fewer than keep every worker busy"


def test_traces_round_trip_and_replay(tmp_path: Path) -> None:
    requests = [
        TraceRequest(0.0, 40, 5),
        TraceRequest(0.5, 50, 6, 2, (("a", 30),)),
        TraceRequest(1.5, 60, 7, 1, (("a", 30),)),
    ]
    write_trace(tmp_path / "t.jsonl", requests)
    assert read_trace(tmp_path / "t.jsonl") == requests
    sessions = trace_sessions(requests, TokenIds(), 0, time_scale=2.0)
    assert [session.arrival_s for session in sessions] == [0.0, 0.25, 0.75]
    prompts = [session.turns[0].prompt for session in sessions]
    assert [len(prompt) for prompt in prompts] == [40, 50, 60]
    assert prompts[1][:30] == prompts[2][:30] != prompts[0][:30]
    (tmp_path / "m.jsonl").write_text(
        '{"timestamp": 1000, "input_length": 600, "output_length": 3, "hash_ids": [4, 5]}\n\n'
        '{"timestamp": 500, "input_length": 700, "output_length": 3, "hash_ids": [4, 6]}\n'
    )
    mooncake = read_trace(tmp_path / "m.jsonl")
    assert [request.arrival_s for request in mooncake] == [0.0, 0.5]
    first, second = (session.turns[0].prompt for session in trace_sessions(mooncake, TokenIds(), 0))
    assert (len(first), len(second)) == (700, 600)
    assert first[:512] == second[:512]
    assert first[512:600] != second[512:600]
    (tmp_path / "a.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:01.5,10,2\n2024-05-10 00:00:03.0,20,4\n"
    )
    azure = read_trace(tmp_path / "a.csv")
    assert [(request.arrival_s, request.prompt_tokens) for request in azure] == [(0.0, 10), (1.5, 20)]
    for name, text in (
        ("x.jsonl", "{}"),
        ("y.jsonl", ""),
        ("z.jsonl", '{"arrival_s":0,"prompt_tokens":0,"output_tokens":1}'),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError):
            read_trace(tmp_path / name)
    with pytest.raises(UsageError):
        read_trace(tmp_path / "missing")


async def test_run_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    cli_run.add_parser(parser.add_subparsers())
    async with FakeServer(first_s=0.0, gap_s=0.0).start() as server:
        flags = [
            "run",
            "--url",
            server.url,
            "--workload",
            "W1",
            "--requests",
            "3",
            "--output-len",
            "4",
            "--no-progress",
        ]
        arguments = parser.parse_args(
            [*flags, "--rate", "200", "--slo", "ttft:1000", "--json", str(tmp_path / "r.json")]
        )
        assert await cli_run.command(arguments) == 0
        server.statuses += [500] * 10
        assert await cli_run.command(parser.parse_args([*flags, "--model", "fake"])) == 1
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["workload"], result["model"], result["tokens"]["output"]) == ("W1*", "fake", 12)
    assert "open, poisson 200/s" in capsys.readouterr().out


def test_chats_and_conversations_choose_words_by_themselves() -> None:
    parser = ArgumentParser()
    cli_run.add_parser(parser.add_subparsers())
    for flags, kind in (
        (["--turns", "3"], str), (["--workload", "chat"], str), (["--endpoint", "chat"], str),
        (["--prompts", "text"], str), ([], tuple), (["--prompts", "ids:5:9"], tuple),
    ):  # fmt: skip
        plan = cli_run.make_plan(parser.parse_args(["run", "--requests", "2", *flags]))
        assert isinstance(plan.sessions[0].turns[0].prompt, kind), flags


@pytest.mark.parametrize(
    "flags",
    [
        ["run", "--workload", "W9"],
        ["run", "--url", "nowhere"],
        ["run", "--prompts", "ids:9:3"],
        ["run", "--n", "0"],
        ["run", "--endpoint", "chat", "--prompts", "ids"],
        ["run", "--turns", "3", "--prompts", "ids:1:9"],
    ],
)
def test_bad_usage_is_one_sentence(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(flags) == 2
    message = capsys.readouterr().err
    assert message.startswith("loadtest: ")
    assert message.count("\n") == 1
