"""Every percentile and rate against numpy, on recorded streams."""

from __future__ import annotations

import json
import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.arrivals import arrival_times
from loadtest.lengths import UsageError, cut_mean, fixed, lognormal, parse_lengths, uniform
from loadtest.record import RequestRecord, decode
from loadtest.summary import Objective, distribution, parse_objective, percentile, summarise

FLOATS = st.floats(-1e6, 1e6, allow_nan=False)


def stream(index: int, scheduled: float, gaps: list[list[float]], *, prompt: int = 10) -> RequestRecord:
    """A recorded stream: choice c gets tokens at scheduled + cumulative gaps[c]; it ends 1 ms after the last."""
    n = len(gaps)
    record = RequestRecord(
        index, planned_tokens=len(gaps[0]), n=n, scheduled_s=scheduled, sent_s=scheduled, status=200
    )
    moments = sorted(
        (scheduled + float(moment), choice) for choice in range(n) for moment in np.cumsum(gaps[choice], dtype=float)
    )
    for moment, choice in moments:
        record.events.append((moment, json.dumps({"choices": [{"index": choice, "text": "x"}]}).encode()))
    end = moments[-1][0] + 0.001
    usage = {"prompt_tokens": prompt, "completion_tokens": len(moments)}
    finish = [{"index": choice, "text": "", "finish_reason": "length"} for choice in range(n)]
    record.events += [(end, json.dumps({"choices": finish, "usage": usage}).encode()), (end, b"[DONE]")]
    record.finished_s = end
    decode(record)
    assert not record.error
    return record


@given(st.lists(FLOATS, min_size=1, max_size=60), st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], percent: float) -> None:
    ordered = sorted(values)
    assert percentile(ordered, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-6)


@given(st.lists(FLOATS, min_size=1, max_size=60))
def test_distribution_is_numpys(values: list[float]) -> None:
    ours = distribution(values)
    theirs = {
        "count": len(values), "mean": np.mean(values), "std": np.std(values), "min": np.min(values),
        "max": np.max(values), **{f"p{q}": np.percentile(values, q) for q in (50, 90, 99)},
    }  # fmt: skip
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert ours[key] == pytest.approx(float(value), rel=1e-9, abs=1e-5), key


def test_nothing_measured_is_said_and_not_zero() -> None:
    assert distribution([]) == {"count": 0}
    assert summarise([])["rates"] == {"requests_per_s": 0, "output_tokens_per_s": 0, "total_tokens_per_s": 0}


@pytest.mark.parametrize("n", [1, 3])
def test_summary_of_recorded_streams(n: int) -> None:
    random = Random(7)
    gaps = [[[random.uniform(0.001, 0.2) for _ in range(5 + index)] for _ in range(n)] for index in range(20)]
    starts = [random.uniform(0, 3) for _ in range(20)]
    records = [stream(index, start, each) for index, (start, each) in enumerate(zip(starts, gaps, strict=True))]
    summary = summarise(records)

    arrivals = [np.cumsum(np.array(each), axis=1) for each in gaps]  # [n, tokens]
    ttft = [float(moments[:, 0].min()) for moments in arrivals]
    tpot = [float((moments.max() - moments[:, 0].min()) / (moments.shape[1] - 1)) for moments in arrivals]
    e2e = [float(moments.max()) + 0.001 for moments in arrivals]
    itl = np.concatenate([np.diff(moments, axis=1).ravel() for moments in arrivals])
    for key, values in (("ttft", ttft), ("tpot", tpot), ("e2e", e2e), ("itl", itl)):
        measured = summary["latency_s"][key]
        assert measured["count"] == len(values)
        for column, expected in (
            ("mean", np.mean(values)), ("p50", np.percentile(values, 50)),
            ("p90", np.percentile(values, 90)), ("p99", np.percentile(values, 99)),
        ):  # fmt: skip
            assert measured[column] == pytest.approx(float(expected), rel=1e-9), (key, column)

    duration = max(start + each for start, each in zip(starts, e2e, strict=True)) - min(starts)
    output = sum(moments.size for moments in arrivals)
    assert summary["duration_s"] == pytest.approx(duration)
    assert summary["tokens"]["output"] == output
    assert summary["rates"]["requests_per_s"] == pytest.approx(20 / duration)
    assert summary["rates"]["output_tokens_per_s"] == pytest.approx(output / duration)
    assert summary["rates"]["total_tokens_per_s"] == pytest.approx((output + 200) / duration)
    assert summary["tokens"]["per_event"] == pytest.approx(1.0)


def test_goodput_counts_requests_that_meet_every_objective() -> None:
    fast, late, slow = stream(0, 0.0, [[0.1, 0.01, 0.01]]), stream(1, 0.0, [[0.9, 0.01]]), stream(2, 0.0, [[0.1, 0.5]])
    failed = RequestRecord(3, error="timeout", finished_s=2.0)
    objective = parse_objective(["ttft:500", "tpot:50"])
    assert [objective.met_by(record) for record in (fast, late, slow, failed)] == [True, False, False, False]
    goodput = summarise([fast, late, slow, failed], objective)["goodput"]
    assert goodput["share"] == 0.25
    assert goodput["requests_per_s"] == pytest.approx(1 / 2.0)
    assert Objective({"itl": 0.02}).met_by(fast)
    assert not Objective({"itl": 0.02}).met_by(slow)
    assert not Objective({"e2e": 0.05}).met_by(fast)
    for wrong in ("ttft", "speed:3", "ttft:-1", "ttft:x"):
        with pytest.raises(UsageError):
            parse_objective([wrong])


def test_failed_and_short_requests_are_counted_apart() -> None:
    short = stream(0, 0.0, [[0.1, 0.1]])
    short.planned_tokens = 5
    lost = RequestRecord(1, status=200, finished_s=1.0)  # nothing came
    refused = RequestRecord(2, status=429, finished_s=1.0)
    for record in (lost, refused):
        decode(record)
    summary = summarise([short, lost, refused])
    assert summary["requests"] == {
        "total": 3,
        "completed": 1,
        "failed": 2,
        "short": 1,
        "without_done": 0,
        "without_usage": 0,
    }
    assert summary["errors"] == {"stream cut off": 1, "http 429": 1}
    assert summary["latency_s"]["e2e"]["count"] == 1


# -- distributions and arrivals


@pytest.mark.parametrize("name", ["sharegpt-in", "sharegpt-out", "alpaca-in", "alpaca-out"])
def test_published_means_come_out(name: str) -> None:
    lengths, random = parse_lengths(name), Random(1)
    drawn = [lengths.draw(random) for _ in range(20_000)]
    assert min(drawn) >= lengths.low
    assert max(drawn) <= lengths.high
    assert np.mean(drawn) == pytest.approx(lengths.mean, rel=0.04)
    assert np.percentile(drawn, 99) > 3 * np.median(drawn), "a long right tail"


def test_cut_mean_is_the_integral() -> None:
    mu, sigma, low, high = 4.0, 1.1, 10.0, 300.0
    grid = np.linspace(low, high, 400_001)
    density = np.exp(-((np.log(grid) - mu) ** 2) / (2 * sigma**2)) / grid
    expected = float(np.trapezoid(grid * density, grid) / np.trapezoid(density, grid))
    assert cut_mean(mu, sigma, low, high) == pytest.approx(expected, rel=1e-6)


def test_lengths_parse_and_print_alike() -> None:
    for text in ("fixed:12", "uniform:3:9", "lognormal:100:0.7:16:512"):
        assert str(parse_lengths(text)) == text
    assert parse_lengths("64") == fixed(64)
    assert {uniform(3, 5).draw(Random(seed)) for seed in range(40)} == {3, 4, 5}
    for wrong in ("", "fixed:0", "uniform:9:3", "uniform:1", "normal:3", "lognormal:1:2", "lognormal:900:1:4:16"):
        with pytest.raises(UsageError):
            parse_lengths(wrong)
    with pytest.raises(UsageError):
        lognormal(1000, 0.5, 4, 100)


@pytest.mark.parametrize(("kind", "variation"), [("poisson", 1.0), ("bursty", 2.0), ("constant", 0.0)])
def test_arrival_rate_and_burstiness(kind: str, variation: float) -> None:
    times = arrival_times(kind, 50.0, 20_000, seed=3, burstiness=0.25)
    gaps = np.diff(times)
    assert times[0] == 0
    assert (gaps >= 0).all()
    assert times[-1] == pytest.approx(19_999 / 50), "exactly the rate"
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(variation, rel=0.06, abs=1e-9), "gamma: 1 / sqrt(shape)"
    assert times == arrival_times(kind, 50.0, 20_000, seed=3, burstiness=0.25)
    if kind != "constant":
        assert times != arrival_times(kind, 50.0, 20_000, seed=4, burstiness=0.25)


def test_poisson_arrivals_are_uniform_given_their_number() -> None:
    times = np.array(arrival_times("poisson", 10.0, 5_000, seed=1))
    counts, _ = np.histogram(times, bins=50)
    chi_square = float(((counts - 100) ** 2 / 100).sum())
    assert 20 < chi_square < 90, "49 degrees of freedom"
    assert arrival_times("poisson", 10.0, 1, seed=1) == (0.0,)


def test_arrivals_refuse_nonsense() -> None:
    for kind, rate, burstiness in (("poisson", 0.0, 1.0), ("bursty", 1.0, -1.0), ("weekly", 1.0, 1.0)):
        with pytest.raises(UsageError):
            arrival_times(kind, rate, 3, 0, burstiness=burstiness)
    assert not math.isnan(sum(arrival_times("bursty", 2.0, 3, 0, burstiness=0.01)))
