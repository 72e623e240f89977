"""The status page: who gets it, what a frame tells, and that it costs nothing while nobody looks."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.outputs import Delivery, Phase
from engine.stats import CacheStats, Picture, SequenceView, StepStats
from server.app import create_app
from server.dashboard.feed import MAX_VIEWERS, Feed
from server.dashboard.window import Sample, Window, quantile
from server.digest import digest_of
from server.metrics import Metrics
from server.protocol.errors import ApiError
from server.routes.dashboard import EVENTS_PATH, FOLDER, PAGE_PATHS
from server.settings import load
from tests.server.harness import eventually
from tests.server.stub_engine import StubEngine


class Watched(StubEngine):
    """Counts how often it is asked for a picture."""

    num_asked = 0

    def paint(self) -> None:
        self.num_asked += 1
        super().paint()


def client_of(engine: StubEngine, **flags: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_app(load(flags), engine)), base_url="http://test")


def feed_of(engine: StubEngine, **options: Any) -> Feed:
    metrics = Metrics()
    engine.add_listener(metrics.observe_delivery)
    return Feed(engine, metrics, (), **options)


async def test_nobody_is_asked_for_anything_while_nobody_watches() -> None:
    engine = Watched(ready=True)
    feed = feed_of(engine, tick_s=0.005)
    await asyncio.sleep(0.05)
    assert feed.is_idle
    assert engine.num_asked == 0
    feed.enter()
    frames = feed.frames()
    for _ in range(3):
        await anext(frames)
    await frames.aclose()
    feed.leave()
    await eventually(lambda: feed.is_idle)
    asked = engine.num_asked
    assert asked >= 3
    await asyncio.sleep(0.05)
    assert engine.num_asked == asked


async def test_all_viewers_share_one_frame_and_a_slow_one_gets_the_latest() -> None:
    engine = Watched(ready=True)
    feed = feed_of(engine, tick_s=0.005)
    viewers = []
    for _ in range(MAX_VIEWERS):
        feed.enter()
        viewers.append(feed.frames())
    with pytest.raises(ApiError) as refused:
        feed.enter()
    assert refused.value.status == 429
    first = await asyncio.gather(*(anext(viewer) for viewer in viewers))
    assert len({id(frame) for frame in first}) == 1, "made once"
    await eventually(lambda: engine.num_asked > 10)
    late, fast = await asyncio.gather(anext(viewers[0]), anext(viewers[1]))
    assert late is fast
    for _ in viewers:
        feed.leave()
    await eventually(lambda: feed.is_idle)
    feed.enter()  # room again


@pytest.mark.parametrize(("phase", "ends"), [(Phase.DEAD, True), (Phase.DRAINING, True), (Phase.STARTING, False)])
async def test_a_feed_ends_with_the_engine_and_begins_before_it(phase: Phase, ends: bool) -> None:
    engine = StubEngine()
    engine.phase = phase
    feed = feed_of(engine, tick_s=0.001)
    feed.enter()
    frames = [frame async for frame, _ in _first(feed, 5)]
    assert len(frames) == (1 if ends else 5)
    told = json.loads(frames[0].removeprefix(b"data: "))
    assert told["phase"] == phase.value
    assert told["model"] is None
    assert told["map"] is None
    feed.leave()


async def _first(feed: Feed, count: int) -> Any:
    number = 0
    async for frame in feed.frames():
        yield frame, number
        number += 1
        if number == count:
            return


async def test_a_feed_that_fails_leaves_nobody_waiting() -> None:
    engine = StubEngine(ready=True)
    feed = feed_of(engine)

    def broken() -> None:
        raise RuntimeError("broken")

    engine.paint = broken  # type: ignore[method-assign]
    feed.enter()
    assert [frame async for frame in feed.frames()] == []
    feed.leave()


async def test_a_frame_is_bounded_and_tells_what_metrics_tells() -> None:
    engine, metrics = StubEngine(ready=True), Metrics()
    feed = Feed(engine, metrics, ("served",), [f"{number}" * 250 for number in range(500)])
    cache = CacheStats(num_blocks=50_000, num_used_blocks=7, num_cached_blocks=3, num_shared_blocks=2)
    metrics.observe_delivery(Delivery(step=StepStats(1, 5, 2, 5, 10, 4, cache=cache)))
    for number in range(500):
        metrics.error(429, "/v1/completions", f"id-{number}")
    feed._window.add(Sample.of(metrics, 0.0))
    feed._keep_picture(Delivery(picture=Picture(bytes(4096), 13)))
    facts = feed.facts()
    assert len(json.dumps(facts)) < 16_000
    assert (facts["running"], facts["waiting"], facts["blocks"]["used"], facts["blocks"]["shared"]) == (5, 2, 7, 2)
    assert facts["model"]["name"] == "served"
    assert [name[:2] for name in facts["model"]["adapters"][:3]] == ["00", "11", "22"]
    assert base64.b64decode(facts["map"]) == bytes(4096)
    assert facts["errors"][0]["id"] == "id-499"
    assert len(facts["errors"]) == 20
    views = [SequenceView(7, 0, 0, 3, 3, 0, 1, 9, 1, 0, 1.0, adapter) for adapter in ("sql", "")]
    feed._keep_picture(Delivery(picture=Picture(bytes(4096), 13, running=tuple(views))))
    assert [row.get("adapter") for row in feed.facts()["sequences"]] == ["sql", None]
    feed._keep_picture(Delivery())
    assert feed.facts()["map"] == facts["map"], "a step's delivery has no picture and takes none away"


# -- rates and percentiles


def test_rates_are_of_the_last_seconds_and_percentiles_of_the_last_minute() -> None:
    metrics, window = Metrics(), Window()
    for second in range(200):
        tokens = 10 if second < 150 else 40
        metrics.observe_delivery(Delivery(step=StepStats(second + 1, 1, 0, 4, 0, tokens, execute_s=0.02)))
        metrics.inter_token(0.2 if second < 150 else 0.004)
        window.add(Sample.of(metrics, float(second)))
    rates = window.rates()
    assert rates["decode_tokens"] == 40
    assert rates["steps"] == 1
    assert rates["batch"] == 4
    assert rates["step_s"] == pytest.approx(0.02)
    _, (p50, p95, _) = window.percentiles(metrics.histograms)
    assert p50 is not None
    assert 0.0025 <= p50 <= 0.005, "50 of the last 60"
    assert p95 is not None
    assert 0.15 <= p95 <= 0.2
    assert len(window._samples) < 63


def test_nothing_is_told_of_nothing_and_the_past_where_the_minute_is_empty() -> None:
    metrics, window = Metrics(), Window()
    window.add(Sample.of(metrics, 0.0))
    assert set(window.rates().values()) == {None}
    assert window.hit_rate() is None
    assert window.percentiles(metrics.histograms) == [[None] * 3] * 2
    metrics.first_token(0.3)
    window.clear()
    window.add(Sample.of(metrics, 1.0))
    assert window.percentiles(metrics.histograms)[0][0] is not None


def test_quantiles_are_those_of_prometheus() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert quantile(bounds, (0, 4, 0, 0), 0.5) == 1.5
    assert quantile(bounds, (2, 0, 2, 0), 0.75) == 3.0
    assert quantile(bounds, (0, 0, 0, 3), 0.5) == 4.0
    assert quantile(bounds, (0, 0, 0, 0), 0.5) is None


# -- who gets it


async def test_the_page_is_the_same_for_all_and_runs_nothing_of_others() -> None:
    async with client_of(StubEngine(), api_key="k") as client:
        for path in PAGE_PATHS:
            answer = await client.get(path)
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "stub" not in answer.text
        assert "data-keys" in (await client.get("/")).text
    async with client_of(StubEngine(ready=True)) as client:
        assert "data-keys" not in (await client.get("/")).text


def test_the_page_names_no_other_host_and_holds_no_script_in_its_text() -> None:
    for name in ("page.html", "page.css", "page.js"):
        text = (FOLDER / name).read_text(encoding="utf-8")
        assert set(re.findall(r"https?://[^'\"\s]+", text)) <= {"http://www.w3.org/2000/svg"}
    page = (FOLDER / "page.html").read_text(encoding="utf-8")
    assert re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL) == [""]
    assert not re.search(r"\sstyle=|\son\w+=|<style", page)


async def test_its_numbers_need_a_key_that_may_watch(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    tables = [
        f'[{scope}]\nsha256 = "{digest_of(scope.encode()).hex()}"\nscopes = ["{scope}"]\n'
        for scope in ("inference", "metrics", "admin")
    ]
    keys.write_text("".join(tables))
    engine = StubEngine(ready=True)
    engine.phase = Phase.DEAD  # one frame, and an end
    async with client_of(engine, api_key_file=str(keys), metrics_auth=False) as client:
        assert (await client.get(EVENTS_PATH)).status_code == 401
        for key, status in (("wrong", 401), ("inference", 403), ("metrics", 200), ("admin", 200)):
            answer = await client.get(EVENTS_PATH, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == status, key
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.text.startswith("data: {")


async def test_pages_of_others_take_no_place() -> None:
    engine = StubEngine(ready=True)
    engine.phase = Phase.DEAD
    async with client_of(engine) as client:
        for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
            assert (await client.get(EVENTS_PATH, headers={"Sec-Fetch-Site": site})).status_code == status


async def test_it_can_be_left_out() -> None:
    async with client_of(StubEngine(ready=True), status_page=False) as client:
        for path in (*PAGE_PATHS, EVENTS_PATH):
            assert (await client.get(path)).status_code == 404


async def test_an_error_is_told_with_its_route_and_no_text_of_the_client() -> None:
    app = create_app(load({}), StubEngine(ready=True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        await client.get("/v1/models/secret-name")
        await client.get("/secret-path")
    first, second = app.state.metrics.recent_errors
    assert (first.status, first.route, second.status, second.route) == (404, "/v1/models/{name:path}", 404, "")
    assert "secret" not in repr(app.state.metrics.recent_errors)
