"""LoRA adapters as operators name them and clients ask for them; that the engine makes another text of each is shown
in tests/e2e/test_adapters.py."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request

from engine.config import Adapter, LoraConfig, StartError
from engine.outputs import QueueFull
from engine.sampling_params import SamplingParams
from server.adapters import LoraModule
from server.app import create_app
from server.cli import build_parser
from server.front import front_for
from server.logs import REQUEST_LOGGER
from server.metrics import Metrics
from server.observe import Observer
from server.preflight import check_adapters
from server.settings import Settings, SettingsError, load
from tests.server.fake_engine import FakeEngine, says, small_tokenizer
from tests.server.harness import client_of, error_of, stream
from tests.server.test_cli import assert_sentence, run
from tests.server.test_terms import BODIES

TWO = (LoraModule("sql", "/a/sql"), LoraModule("team/chat v2", "/a/chat"))
SERVED = {"lora_modules": TWO, "served_model_name": ("base", "alias")}


def engine() -> FakeEngine:
    tokenizer = small_tokenizer()
    return FakeEngine(says("hello", tokenizer), tokenizer=tokenizer)


# -- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        ["sql=/a/sql", "team/chat v2=/a/chat"],
        ["sql=/a/sql, team/chat v2 = /a/chat"],
        ['{"name": "sql", "path": "/a/sql"}', "team/chat v2=/a/chat"],
        ['[{"name": "sql", "path": "/a/sql"}, {"name": "team/chat v2", "path": "/a/chat", "base_model_name": null}]'],
    ],
)
def test_every_spelling_is_the_same_list(given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load({"lora_modules": given}).lora_modules == TWO
    assert load({"lora_modules": given}).engine_config().lora == LoraConfig(TWO)
    if len(given) == 1:
        monkeypatch.setenv("PAGEMILL_LORA_MODULES", given[0])
        assert load({}).lora_modules == TWO
    file = tmp_path / "mine.toml"
    file.write_text(f"lora_modules = {json.dumps(given)}\n")
    monkeypatch.delenv("PAGEMILL_LORA_MODULES", raising=False)
    assert load({}, file).lora_modules == TWO


@pytest.mark.parametrize(
    "text",
    [
        '[lora_modules]\nsql = "/a/sql"\n"team/chat v2" = "/a/chat"\n',
        '[[lora-modules]]\nname = "sql"\npath = "/a/sql"\n[[lora-modules]]\nname = "team/chat v2"\npath = "/a/chat"\n',
    ],
)
def test_tables_of_a_file(text: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    assert load({}, file).lora_modules == TWO


def test_several_may_follow_one_flag_and_the_flag_may_be_repeated() -> None:
    words = ["serve", "model", "--lora-modules", "a=x", "b=y=z", "--lora-modules", "c=w", "--port", "1"]
    given = vars(build_parser().parse_args(words))
    assert given["model"] == "model"
    modules = load({"lora_modules": given["lora_modules"]}).lora_modules
    assert [(module.name, module.path) for module in modules] == [("a", "x"), ("b", "y=z"), ("c", "w")]


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ("sql", "must be NAME=PATH"), ("=x", "printable"), ("sql=", "must have a path for 'sql'"),
        ("a=x,a=y", "two adapters alike"), ("a\nb=x", "printable"), ("a" * 257 + "=x", "printable"), ("a=\0", "path"),
        ("", "must be NAME=PATH"), ("a=x,", "must be NAME=PATH"), ("\ud800=x", "printable"),
        ("..=x", ". or .."), ("a/./b=x", ". or .."),
        ("{", "is not valid JSON"), ("[" * 100_000, "is not valid JSON"), ("[1]", "must be NAME=PATH"),
        ('{"name": "a"}', "must have a path"), ('{"path": "a"}', "printable"), ('{"name": 1, "path": "a"}', "texts"),
        ('{"name": "a,b", "path": "x"}', "commas"), ('{"name": " a", "path": "x"}', "blanks"),
        ('{"name": "a", "path": "x", "rank": 8}', "no other keys"),
    ],
)  # fmt: skip
def test_a_wrong_one_is_one_sentence(given: str, part: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load({"lora_modules": [given]})
    told = str(caught.value)
    assert told.startswith("--lora-modules: ")
    assert part in told
    assert told.endswith(".")
    assert "\n" not in told
    assert len(told) < 300


@pytest.mark.parametrize("value", ["1", "[1]", "{ a = 1 }", "true", '[{ name = "a" }]', '{ a = "" }'])
def test_a_wrong_one_in_a_file_names_the_file(value: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f"lora_modules = {value}\n")
    with pytest.raises(SettingsError, match=r"^lora_modules in .*mine\.toml: must "):
        load({}, file)


def test_an_adapter_is_not_called_like_the_model() -> None:
    with pytest.raises(StartError, match=r"^--lora-modules: 'alias' is a name of the model itself\.$"):
        load({"lora_modules": ["alias=x"], "served_model_name": ["base", "alias"]}).engine_config()
    assert load({"lora_modules": ["fake-model=x"]}).engine_config().lora.adapters[0].name == "fake-model"
    with pytest.raises(StartError, match="'fake-model' is a name of the model itself"):  # known once it is loaded
        front_for(create(engine(), lora_modules=["fake-model=x"]))


def create(served: FakeEngine, **settings: Any) -> Any:
    return create_app(load(settings), served)


def test_what_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    model, empty = tmp_path / "model", tmp_path / "empty"
    for folder in (model, empty):
        folder.mkdir()
    (model / "config.json").write_text("{}")
    for command, more in (("serve", ("--port", "0")), ("check", ())):
        told = run(command, str(model), *more, "--lora-modules", f"a={tmp_path}/none")
        assert_sentence(told, 1, f"There is no adapter's folder at {tmp_path}/none, --lora-modules a.")
    assert_sentence(run("check", str(model), "--lora-modules", f"a={empty}"), 1, "There is no adapter_config.json in ")
    for path in ("x" * 5000, "~nobody-of-that-name/x"):
        with pytest.raises(StartError, match=r"^Cannot look for an adapter at .*, --lora-modules a: .*\.$"):
            check_adapters([Adapter("a", path)])
    (empty / "adapter_config.json").write_text("{}")
    check_adapters([Adapter("a", str(empty))])


# -- requests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
async def test_the_model_of_a_request_may_be_an_adapter_and_the_answer_names_it(path: str) -> None:
    served = engine()
    async with client_of(served, **SERVED) as client:
        for name, adapter in (
            ("sql", "sql"),
            ("team/chat v2", "team/chat v2"),
            ("base", ""),
            ("alias", ""),
            (None, ""),
        ):
            answer = await client.post(path, json=BODIES[path] | {"model": name})
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == (name or "base")
            assert served.admitted[-1].adapter == adapter
        before = len(served.admitted)
        for unknown in ("sql2", "SQL", "sql ", "", "/a/sql", "fake-model"):
            answer = await client.post(path, json=BODIES[path] | {"model": unknown})
            assert answer.status_code == 404
            if path != "/v1/messages":
                assert error_of(answer, 404)["code"] == "model_not_found"
    assert len(served.admitted) == before


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_names_it_in_every_chunk(path: str) -> None:
    async with client_of(engine(), **SERVED) as client:
        events = await stream(client, path, BODIES[path] | {"model": "sql"})
    assert {chunk["model"] for chunk in events.chunks} == {"sql"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]}),
        ("/v1/responses/input_tokens", {"input": "a"}), ("/v1/messages/count_tokens", BODIES["/v1/messages"]),
    ],
)  # fmt: skip
async def test_what_only_counts_takes_their_names_too(path: str, body: dict[str, Any]) -> None:
    async with client_of(engine(), **SERVED) as client:
        told = [await client.post(path, json=body | {"model": name}) for name in ("sql", "base", "none")]
    assert [answer.status_code for answer in told] == [200, 200, 404]
    assert told[0].json() == told[1].json(), "the tokenizer and the template are the model's"


async def test_the_list_of_models_has_them_below_the_model_and_tells_no_path() -> None:
    modules = (*TWO, LoraModule("old", "/a/old", "meta/base"))
    async with client_of(engine(), **(SERVED | {"lora_modules": modules})) as client:
        listed = (await client.get("/v1/models")).json()
        one = (await client.get("/v1/models/team/chat v2")).json()
        error_of(await client.get("/v1/models/none"), 404)
        everything = (await client.get("/v1/models")).text + (await client.get("/openapi.json")).text
    lineage = [(model["id"], model["root"], model["parent"]) for model in listed["data"]]
    assert lineage == [
        ("base", "fake-model", None),
        ("alias", "fake-model", None),
        ("sql", "sql", "base"),
        ("team/chat v2", "team/chat v2", "base"),
        ("old", "old", "meta/base"),
    ]
    assert one == listed["data"][3]
    assert (one["object"], one["owned_by"], one["max_model_len"]) == ("model", "pagemill", 512)
    assert listed["last_id"] == "old"
    assert "/a/" not in everything


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
async def test_none_is_loaded_or_taken_away_while_the_server_runs(path: str) -> None:
    async with client_of(engine(), **SERVED) as client:
        answer = await client.post(path, json={"lora_name": "sql", "lora_path": "/etc"})
        error_of(answer, 404)
        assert len((await client.get("/v1/models")).json()["data"]) == 4


# -- what is told of them -----------------------------------------------------------------------------------------


async def test_the_log_line_names_the_adapter(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, REQUEST_LOGGER)
    async with client_of(engine(), **SERVED) as client:
        for name in ("sql", "base", "none\nsuch"):
            await client.post("/v1/completions", json=BODIES["/v1/completions"] | {"model": name})
    lines = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert [line.get("adapter") for line in lines] == ["sql", None, None]


Numbers = dict[tuple[str, str, str], float]
REASON = "finished_reason"
PLACES = ("base", "sql", "team/chat v2")


async def numbers_of(client: httpx.AsyncClient) -> Numbers:
    """(family, adapter, finished_reason) -> value."""
    text = (await client.get("/metrics")).text
    return {
        (sample.name.removeprefix("pagemill_"), sample.labels.get("adapter", ""), sample.labels.get(REASON, "")): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not {"state", "code", "phase", "le"} & set(sample.labels)
    }


async def test_counts_by_adapter_agree_with_usage_to_the_token_and_with_the_sums() -> None:
    served = engine()
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("/v1/completions", "sql", {"prompt": ["a", "bcd"], "n": 2, "max_tokens": 4}),
        ("/v1/completions", "sql", {"prompt": "abc", "stop": "ll", "max_tokens": 9}),
        ("/v1/chat/completions", "team/chat v2", BODIES["/v1/chat/completions"]),
        ("/v1/completions", "alias", {"prompt": "x", "max_tokens": 3}),
        ("/v1/embeddings", "sql", {"input": ["abcd", "e"]}),
    ]
    usage = dict.fromkeys(PLACES, (0, 0))
    async with client_of(served, **SERVED) as client:
        for path, name, body in asked:
            told = (await client.post(path, json=body | {"model": name})).json()["usage"]
            place = "base" if name == "alias" else name
            prompt, completion = usage[place]
            usage[place] = prompt + told["prompt_tokens"], completion + told.get("completion_tokens", 0)
        served.fail_after = 1
        answer = await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4, "model": "sql"})
        assert answer.status_code == 500
        served.refusal = QueueFull("full")
        assert (await client.post("/v1/completions", json={"prompt": "abc", "model": "sql"})).status_code == 429
        numbers = await numbers_of(client)
    failed = (3, 1)  # its tokens count, as they do among all, though nobody was told of them
    for place, (prompt, completion) in usage.items():
        extra = failed if place == "sql" else (0, 0)
        assert numbers["adapter_prompt_tokens_total", place, ""] == prompt + extra[0]
        assert numbers["adapter_generation_tokens_total", place, ""] == completion + extra[1]
        assert numbers["adapter_requests_running", place, ""] == numbers["adapter_requests_waiting", place, ""] == 0
    ends = {
        (place, reason): count for (name, place, reason), count in numbers.items() if name == "adapter_requests_total"
    }
    assert {key: count for key, count in ends.items() if count} == {
        ("sql", "length"): 4, ("sql", "stop"): 3, ("sql", "error"): 1, ("team/chat v2", "length"): 1,
        ("base", "length"): 1,
    }  # fmt: skip
    for kind in ("prompt_tokens_total", "generation_tokens_total"):
        assert sum(numbers[f"adapter_{kind}", place, ""] for place in PLACES) == numbers[kind, "", ""]
    for (_, reason), _count in ends.items():
        assert sum(ends[place, reason] for place in PLACES) == numbers["request_success_total", "", reason]


def test_a_request_waits_until_it_has_a_row_and_runs_until_it_has_ended() -> None:
    metrics = Metrics(("base",), ("sql",))
    row_s: list[float] = []
    observer, other = Observer(metrics, 0.0, {}), Observer(metrics, 0.0, {})
    observer.admitted(
        Request({"type": "http"}), "sql", SamplingParams(), "id", 0.0, adapter="sql",
        row_s=lambda: row_s[0] if row_s else None,
    )  # fmt: skip
    other.admitted(Request({"type": "http"}), "base", SamplingParams(), "id", 0.0, adapter="", row_s=lambda: None)
    sql, base = metrics.adapters.of("sql"), metrics.adapters.of("")
    assert [(count.num_open, count.num_running) for count in (sql, base)] == [(1, 0), (1, 0)]
    row_s.append(1.5)
    assert [(count.num_open, count.num_running) for count in (sql, base)] == [(1, 1), (1, 0)]
    other.took(0, 1, 0, None)  # a token tells as much
    assert (base.num_open, base.num_running) == (1, 1)
    observer.ended(3, 0, 0, num_unfinished=1, failed=False)
    other.ended(3, 1, 0, num_unfinished=0, failed=False)
    assert [(count.num_open, count.num_running) for count in (sql, base)] == [(0, 0), (0, 0)]
    assert sql.finished["abort"] == 1


async def test_labels_are_the_operators_names_and_no_others() -> None:
    async with client_of(engine(), **SERVED) as client:
        before = set(await numbers_of(client))
        for number in range(40):
            await client.post("/v1/completions", json={"prompt": "a", "model": f"sql-{number}"})
        assert set(await numbers_of(client)) - before == set()
    assert {place for name, place, _ in before if name.startswith("adapter_")} == set(PLACES)


async def test_without_adapters_the_model_has_its_row_once_it_has_a_name() -> None:
    async with client_of(engine()) as client:
        assert "pagemill_adapter_" not in (await client.get("/metrics")).text
    async with client_of(engine(), served_model_name=("m",)) as client:
        numbers = await numbers_of(client)
    assert {place for name, place, _ in numbers if name.startswith("adapter_")} == {"m"}


def test_the_default_serves_none() -> None:
    assert Settings().lora_modules == ()
