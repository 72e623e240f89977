"""LoRA adapters before a real process: a tiny model and two adapters made on the spot, as peft would save them."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from engine.models.lora import LayerShape
from tests.e2e.conftest import real_server
from tests.e2e.test_operation import client_of, quiet
from tests.engine.adapters import write_adapter
from tests.server.process import ROOT, ServerProcess
from tests.tiny import tiny_folder

NAMES = ("tiny", "a", "team/b")
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def make_adapter(folder: Path, model: Path, seed: int, *, more_columns: int = 0) -> str:
    """NAME=PATH of one that changes all linear layers of `model`. more_columns: so many too many."""
    weights = load_file(model / "model.safetensors")
    shapes = {
        name.removesuffix(".weight"): LayerShape(len(weight), weight.shape[1] + more_columns)
        for name, weight in weights.items()
        if name.endswith("_proj.weight")
    }
    assert shapes
    write_adapter(folder, shapes, seed=seed)
    return f"{folder.name}={folder}"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """MODEL and the flags to serve it with both adapters."""
    parent = tmp_path_factory.mktemp("adapters")
    model = tiny_folder(parent, "llama")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    modules = [make_adapter(parent / "a", model, 1)]
    _, _, path = make_adapter(parent / "b", model, 2).partition("=")
    modules.append(json.dumps({"name": "team/b", "path": path}))
    cache = str(parent / "cache")
    sizes = ["--max-model-len", "512", "--kv-cache-memory", "24MiB", "--num-threads", "1", "--cache-dir", cache]
    return [str(model), *sizes, "--served-model-name", "tiny", "--lora-modules", *modules]


@pytest.fixture(scope="module")
def adapted(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with real_server(log, *flags, "--metrics-compat", "vllm") as server:
        yield server


@pytest.fixture
def http(adapted: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=adapted.url, timeout=60, trust_env=False) as client:
        yield client


def asked(name: str, prompt: str, **more: Any) -> dict[str, Any]:
    body = {"model": name, "prompt": prompt, "max_tokens": 24, "temperature": 0, "return_token_ids": True}
    return body | {"ignore_eos": True} | more


def token_ids(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def test_each_makes_another_text_and_puts_its_name_to_it(http: httpx.Client) -> None:
    routes: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "Once", "max_tokens": 24},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 24},
        "/v1/responses": {"input": "Once", "max_output_tokens": 24},
        "/v1/messages": {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 24},
        "/v1/embeddings": {"input": "Once"},
    }
    for path, body in routes.items():
        told = []
        for name in NAMES:
            greedy = {} if path == "/v1/embeddings" else {"temperature": 0}
            answer = http.post(path, json={"model": name, **greedy, **body})
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == name
            told.append(
                str(answer.json().get("choices") or answer.json().get("output") or answer.json().get("content"))
            )
            if path == "/v1/embeddings":
                told[-1] = str(answer.json()["data"])
            told[-1] = re.sub(r"(msg|rs)_\w+", "", told[-1])
        assert len(set(told)) == 3, path
    absent = http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 24, "temperature": 0}).json()
    base = http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 24, "temperature": 0, "model": "tiny"})
    assert absent["choices"] == base.json()["choices"]


async def test_mixed_in_one_batch_they_say_what_they_say_alone(adapted: ServerProcess) -> None:
    prompts = ["Once upon a time", "The", "A mill grinds paper into pages, and pages into books. " * 3]
    bodies = [asked(name, prompt, max_tokens=40) for prompt in prompts for name in NAMES]
    async with client_of(adapted) as client:
        alone = [token_ids(await client.post("/v1/completions", json=body)) for body in bodies]
        for order in (1, -1):
            answers = await asyncio.gather(*(client.post("/v1/completions", json=b) for b in bodies[::order]))
            assert [token_ids(answer) for answer in answers][::order] == alone
    for start in range(0, len(bodies), 3):
        assert len({tuple(ids) for ids in alone[start : start + 3]}) == 3


def test_streamed_and_plain_are_one_text(http: httpx.Client) -> None:
    for name in NAMES:
        plain = http.post("/v1/completions", json=asked(name, "Once")).json()
        text, models = "", set()
        with http.stream("POST", "/v1/completions", json=asked(name, "Once", stream=True)) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    models.add(chunk["model"])
                    text += "".join(choice["text"] for choice in chunk["choices"])
        assert text == plain["choices"][0]["text"]
        assert models == {name}


def test_what_one_has_computed_is_found_by_the_same_one_alone(http: httpx.Client) -> None:
    prompt = "What the prefix cache has of this belongs to one adapter, or to the model itself."

    def cached(name: str) -> int:
        usage = http.post("/v1/completions", json=asked(name, prompt, max_tokens=1)).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(name) for name in (*NAMES, *NAMES)][:3] == [0, 0, 0]
    assert all(cached(name) >= 64 for name in NAMES)


async def test_counts_agree_with_usage_to_the_token(adapted: ServerProcess) -> None:
    def by_adapter(text: str) -> dict[tuple[str, str], float]:
        return {
            (sample.name.removeprefix("pagemill_adapter_"), sample.labels["adapter"]): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if "adapter" in sample.labels and sample.labels.get("finished_reason", "length") == "length"
        }

    async with client_of(adapted) as client:
        before = by_adapter(await quiet(client))
        bodies = [asked(name, f"Count {i}", n=1 + i % 2, max_tokens=5 + i) for i in range(6) for name in NAMES]
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        after = by_adapter(await quiet(client))
    assert {name for _, name in after} == set(NAMES)
    for name in NAMES:
        usage = [answer.json()["usage"] for answer in answers if answer.json()["model"] == name]
        risen = {kind: after[kind, name] - before[kind, name] for kind, of in after if of == name}
        assert risen["prompt_tokens_total"] == sum(each["prompt_tokens"] for each in usage)
        assert risen["generation_tokens_total"] == sum(each["completion_tokens"] for each in usage)
        assert risen["requests_total"] == 9
        assert after["requests_running", name] == after["requests_waiting", name] == 0


async def test_the_endpoint_picker_sees_which_run(adapted: ServerProcess) -> None:
    async def told(client: httpx.AsyncClient) -> dict[str, str]:
        text = (await client.get("/metrics")).text
        ((labels),) = re.findall(r"^vllm:lora_requests_info\{(.*)\} ", text, re.MULTILINE)
        return dict(re.findall(r'(\w+)="([^"]*)"', labels))

    async with client_of(adapted) as client:
        await quiet(client)
        assert await told(client) == {"max_lora": "2", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        seen: set[str] = set()
        for number in range(20):  # whoever asks may be late
            body = asked("team/b", f"Long {number}", max_tokens=450)
            answering = asyncio.create_task(client.post("/v1/completions", json=body))
            while not answering.done():
                seen.add((await told(client))["running_lora_adapters"])
            assert (await answering).status_code == 200
            if "team/b" in seen:
                break
        assert "team/b" in seen
        assert seen <= {"", "team/b"}
        await quiet(client)
        assert (await told(client))["running_lora_adapters"] == ""


def test_openais_client_finds_and_uses_them(adapted: ServerProcess) -> None:
    with httpx.Client(trust_env=False) as transport:
        sdk = openai.OpenAI(base_url=adapted.url + "/v1", api_key="unused", max_retries=0, http_client=transport)
        assert [model.id for model in sdk.models.list()] == list(NAMES)
        one = sdk.models.retrieve("team/b").model_dump()
        assert (one["root"], one["parent"]) == ("team/b", "tiny")
        answer = sdk.chat.completions.create(model="a", messages=[{"role": "user", "content": "Hi"}], max_tokens=4)
        assert answer.model == "a"
        with pytest.raises(openai.NotFoundError) as caught:
            sdk.completions.create(model="c", prompt="Hi")
    assert caught.value.code == "model_not_found"


def command(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "server", *words]
    return subprocess.run(call, cwd=ROOT, input=text, capture_output=True, text=True, timeout=120, check=False)


def test_the_terminal_chat_talks_to_one(adapted: ServerProcess) -> None:
    options = ["chat", "--base-url", adapted.url, "--max-tokens", "4", "--temperature", "0", "--model"]
    told = [command(*options, name, text="Hi\n/quit\n") for name in NAMES]
    assert [done.returncode for done in told] == [0, 0, 0], told
    assert len({done.stdout.partition("\n")[2] for done in told}) == 3


def test_check_names_them(flags: list[str]) -> None:
    done = command("check", *flags)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^adapters +a, team/b$", done.stdout, re.MULTILINE)
    path = flags[-2].partition("=")[2]
    done = command("check", *flags[:-5], "--lora-modules", f"{Path(flags[0]).name}={path}")
    assert done.returncode == 1, done.stdout
    assert "is a name of the model itself" in done.stderr


def test_one_that_does_not_fit_the_model_ends_the_start_in_one_sentence(flags: list[str], tmp_path: Path) -> None:
    wrong = make_adapter(tmp_path / "wrong", Path(flags[0]), 3, more_columns=1)
    done = command("serve", *flags[:-3], "--port", "0", "--lora-modules", wrong)
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("pagemill: ")]
    assert "wrong" in line
    assert "Traceback" not in done.stderr


def test_names_in_a_strangers_file_command_no_terminal(flags: list[str], tmp_path: Path) -> None:
    named = make_adapter(tmp_path / "named", Path(flags[0]), 3)
    path = tmp_path / "named" / "adapter_model.safetensors"
    save_file({**load_file(path), "\x1b[2J\nall is well": torch.zeros(1)}, path)
    done = command("check", *flags[:-3], "--lora-modules", named)
    assert done.returncode == 1, done.stderr
    assert r"its tensor \x1b[2J\nall is well is no lora_A.weight" in done.stderr
    assert "\x1b" not in done.stderr
