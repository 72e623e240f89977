"""Token ids in, token ids out: scheduling, paged KV and models. `engine.LLM` is the engine in your own process.

Nothing is imported until it is asked for: half of the house needs no torch."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {"LLM": "engine.llm", "SamplingParams": "engine.sampling_params", "EngineConfig": "engine.config"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
