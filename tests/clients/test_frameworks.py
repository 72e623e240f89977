"""Frameworks that people point at an OpenAI-compatible server, each used the way its documentation shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

from tests.clients.conftest import KEY, MODEL


class Person(BaseModel, extra="forbid"):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


def test_langchain(v1: str) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    chat = langchain.ChatOpenAI(model=MODEL, base_url=v1, api_key=KEY, max_tokens=200, temperature=0)
    assert chat.invoke("Say hello.").content
    assert "".join(chunk.content for chunk in chat.stream("Say hello.")) == chat.invoke("Say hello.").content
    person = chat.with_structured_output(Person, method="json_schema").invoke("Invent a person.")
    assert isinstance(person, Person)
    person = chat.with_structured_output(Person, method="function_calling").invoke("Invent a person.")
    assert isinstance(person, Person)

    def get_weather(city: str) -> str:
        """The weather in a city."""
        return "sunny in " + city

    called = chat.bind_tools([get_weather], tool_choice="required").invoke("The weather in Paris?")
    assert called.tool_calls[0]["name"] == "get_weather"
    embedder = langchain.OpenAIEmbeddings(model=MODEL, base_url=v1, api_key=KEY, check_embedding_ctx_length=False)
    assert len(embedder.embed_query("a text")) > 100
    assert langchain.OpenAI(model=MODEL, base_url=v1, api_key=KEY, max_tokens=8).invoke("Once upon")


def test_llama_index(v1: str) -> None:
    module = pytest.importorskip("llama_index.llms.openai_like", reason="llama-index is not installed")
    llm = module.OpenAILike(
        model=MODEL, api_base=v1, api_key=KEY, is_chat_model=True, context_window=2048, max_tokens=16, temperature=0
    )
    text = llm.complete("Say hello.").text
    assert text
    assert "".join(part.delta or "" for part in llm.stream_complete("Say hello.")) == text


def test_litellm(v1: str) -> None:
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    asked: dict[str, Any] = {
        "model": "hosted_vllm/" + MODEL,
        "api_base": v1,
        "api_key": KEY,
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 16,
        "temperature": 0,
    }
    text = litellm.completion(**asked).choices[0].message.content
    assert text
    assert "".join(c.choices[0].delta.content or "" for c in litellm.completion(**asked, stream=True)) == text
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**{**asked, "temperature": -5})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**asked, "messages": [{"role": "user", "content": "word " * 20_000}]})


def test_instructor(v1: str) -> None:
    instructor = pytest.importorskip("instructor", reason="instructor is not installed")
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=v1, api_key=KEY), mode=mode)
        person = client.chat.completions.create(
            model=MODEL,
            response_model=Person,
            messages=[{"role": "user", "content": "Invent a person."}],
            max_tokens=200,
            max_retries=0,
        )
        assert isinstance(person, Person)


async def test_pydantic_ai(v1: str) -> None:
    agents = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=v1, api_key=KEY))
    settings = {"max_tokens": 200}
    plain = await agents.Agent(model).run("Say hello.", model_settings=settings)
    assert plain.output
    person = await agents.Agent(model, output_type=Person).run("Invent a person.", model_settings=settings)
    assert isinstance(person.output, Person)
    async with agents.Agent(model).run_stream("Say hello.", model_settings=settings) as stream:
        assert await stream.get_output()


def test_llm_command(base_url: str, v1: str, tmp_path: Path) -> None:
    pytest.importorskip("llm", reason="llm is not installed")
    (tmp_path / "extra-openai-models.yaml").write_text(
        json.dumps([{"model_id": "here", "model_name": MODEL, "api_base": v1, "api_key_name": "here"}])
    )
    environment = {"LLM_USER_PATH": str(tmp_path), "PATH": "", "HOME": str(tmp_path)}
    for extra in ([], ["--no-stream"]):
        done = subprocess.run(
            [sys.executable, "-m", "llm", "-m", "here", "--key", KEY, "-o", "max_tokens", "16", *extra, "Say hello."],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
