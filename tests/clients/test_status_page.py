"""The status page in a real browser, before a real server under load: what it shows, what it asks for, how it looks.

Needs the package playwright and a Chromium: its own, the system's, or the one that PAGEMILL_CHROMIUM names."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.conftest import KEY, MODEL, serve

playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")

PREFIX = "You are the narrator of a long tale about a mill that grinds paper into pages, and pages into books. " * 6
PROMPTS = ("Tell of the miller.", "Tell of the river.", "Who reads the books?", "What does the wheel say?")
NUMBERS = ("decode", "prompt", "ttft-0", "ttft-1", "itl-0", "itl-2", "hits", "step", "running")
WIDE, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    named = os.environ.get("PAGEMILL_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with playwright.sync_playwright() as driver:
        try:
            started = driver.chromium.launch(executable_path=named, args=["--no-sandbox", "--disable-gpu"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium here (PAGEMILL_CHROMIUM names one): {str(error).splitlines()[0]}")
        yield started
        started.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ("--kv-cache-memory", "96MiB", "--max-model-len", "2048", "--max-num-seqs", "6", "--num-threads", "1")
    with serve(tmp_path_factory.mktemp("server") / "log", *flags) as url:
        yield url


@pytest.fixture
def load(url: str) -> Iterator[None]:
    """Some clients that tell tales which begin alike, one of them of three choices, until the test is over."""
    over = threading.Event()

    def tell(number: int) -> None:
        body = {"model": MODEL, "max_tokens": 120 + 60 * number, "ignore_eos": True, "n": 3 if number == 0 else 1}
        with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=120) as client:
            while not over.is_set():
                prompt = PREFIX + PROMPTS[number % len(PROMPTS)]
                with contextlib.suppress(httpx.TransportError):
                    client.post(url + "/v1/completions", json=body | {"prompt": prompt})

    clients = [threading.Thread(target=tell, args=(number,)) for number in range(7)]
    for client in clients:
        client.start()
    yield
    over.set()
    for client in clients:
        client.join()


class Visit:
    """One page in a browser, and what it has done: lines on its console, origins and paths that it asked."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.page = browser.new_context(**options).new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda line: self.complaints.append(line.text) if line.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url + "/")

    def enter(self, key: str) -> None:
        self.page.get_by_label("API key").fill(key)
        self.page.get_by_role("button", name="Look in").click()

    def text(self, id: str) -> str:
        return str(self.page.locator(f"#{id}").inner_text())

    def until(self, condition: Callable[[], object], what: str, within_s: float = 60.0) -> None:
        for _ in range(int(within_s / 0.2)):
            if condition():
                return
            self.page.wait_for_timeout(200)
        raise AssertionError(f"{what} never came to be; on the page:\n{self.page.locator('main').inner_text()}")

    def cells(self) -> list[int]:
        return list(self.page.evaluate("Array.from(map.cells)"))

    def colours(self) -> int:
        """How many different colours the map shows."""
        told = (
            "(() => { const c = document.getElementById('map'); const d = c.getContext('2d').getImageData(0, 0, "
            "c.width, c.height).data; const s = new Set(); for (let i = 0; i < d.length; i += 4) if (d[i + 3] === 255)"
            " s.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]); return s.size; })()"
        )
        return int(self.page.evaluate(told))

    def screenshot(self, name: str) -> None:
        folder = os.environ.get("PAGEMILL_SCREENSHOTS")
        if folder:
            self.page.screenshot(path=Path(folder) / name, full_page=True)


def test_the_page_shows_a_server_at_work_and_talks_to_it(browser: Any, url: str, load: None) -> None:
    httpx.post(url + "/v1/completions", json={"prompt": 1, "x": 2}, headers={"Authorization": f"Bearer {KEY}"})
    visit = Visit(browser, url, viewport=WIDE, device_scale_factor=1, color_scheme="dark")
    page = visit.page
    visit.enter("sk-wrong")
    visit.until(lambda: visit.text("door-error"), "a word about the wrong key")
    visit.enter(KEY)
    visit.until(lambda: visit.text("phase") == "ready", "the phase")
    assert visit.text("model") == MODEL
    assert not page.get_by_label("Model or adapter").is_visible(), "there is nothing to choose from"
    visit.until(lambda: page.locator("#rows tr").count() > 4, "rows of sequences")
    visit.until(lambda: all(re.search(r"\d", visit.text(id)) for id in NUMBERS), "numbers")
    visit.until(lambda: {min(code >> 1, 2) for code in visit.cells()} == {0, 1, 2}, "free, used and shared blocks")
    assert visit.colours() > 4

    cells, rows = visit.cells(), visit.text("rows")
    visit.until(lambda: visit.cells() != cells and visit.text("rows") != rows, "a change")
    page.locator("#map").press("ArrowRight")
    assert re.match(r"Block 0: (held|free)", visit.text("hint"))

    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Message", exact=True).fill("What is the capital of France?")
    page.get_by_role("button", name="Send").click()
    visit.until(lambda: "tokens" in page.locator(".said.assistant small").last.inner_text(), "the answer")
    assert "Paris" in page.locator(".said.assistant").last.inner_text()
    assert "400" in visit.text("errors")
    assert "/v1/completions" in visit.text("errors")

    visit.until(lambda: len(page.evaluate("sparks.decode.values")) > 60, "some history")
    page.mouse.move(0, 0)
    visit.screenshot("status-page.png")
    refused = [line for line in visit.complaints if "401" in line]  # Chromium's own lines of what had no right key
    assert visit.complaints == refused
    assert len(refused) == 1
    assert {httpx.URL(each).copy_with(path="/").host for each in visit.asked if each.startswith("http")} == {
        "127.0.0.1"
    }
    assert all(each.startswith((url + "/", "data:")) for each in visit.asked)


def test_it_fits_a_phone_in_daylight_and_every_control_has_a_name(browser: Any, url: str, load: None) -> None:
    visit = Visit(browser, url, viewport=PHONE, device_scale_factor=1, color_scheme="light")
    visit.enter(KEY)
    visit.until(lambda: visit.page.locator("#rows tr").count() > 3, "rows of sequences")
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    for control in visit.page.locator("button, input, textarea, canvas, section, dialog, [tabindex]").all():
        named = control.evaluate(
            "e => e.getAttribute('aria-label') || e.labels?.[0]?.textContent || e.textContent ||"
            " document.getElementById(e.getAttribute('aria-labelledby'))?.textContent"
        )
        assert named.strip(), control
    visit.page.wait_for_timeout(3000)
    visit.screenshot("phone.png")


def write_adapter(folder: Path) -> Path:
    """In peft's format, for the demo model: a change of no size to one layer's queries."""
    shapes = {"lora_A": [4, 576], "lora_B": [576, 4]}
    header, size = {}, 0
    for name, (rows, columns) in shapes.items():
        end = size + rows * columns * 4
        at = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [size, end]}
        header[f"base_model.model.model.layers.0.self_attn.q_proj.{name}.weight"] = at
        size = end
    told = json.dumps(header).encode()
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(len(told).to_bytes(8, "little") + told + bytes(size))
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"], "layers_to_transform": [0]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_without_keys_it_shows_itself_at_once_and_ends_with_the_server(browser: Any, tmp_path: Path) -> None:
    adapters = ("--lora-modules", f"pirate={write_adapter(tmp_path / 'pirate')}")
    with serve(tmp_path / "log", "--kv-cache-memory", "32MiB", *adapters, key=None) as url:
        visit = Visit(browser, url)
        visit.until(lambda: visit.text("phase") == "ready", "the phase")
        assert not visit.page.locator("#door").is_visible()
        visit.until(lambda: len(visit.cells()) > 10, "the map")
        visit.page.get_by_label("Model or adapter").select_option("pirate")
        visit.page.get_by_label("Message", exact=True).fill("What is the capital of France?")
        with visit.page.expect_request("**/v1/chat/completions") as asked:
            visit.page.get_by_role("button", name="Send").click()
        assert asked.value.post_data_json["model"] == "pirate"
        visit.until(lambda: "tokens" in visit.page.locator(".said.assistant small").last.inner_text(), "the answer")
    visit.until(lambda: visit.text("phase") == "lost", "the word that the server is gone")
