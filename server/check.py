"""`pagemill check MODEL`: where the memory would go and how many sequences would fit, without serving."""

from __future__ import annotations

from collections.abc import Sequence

from engine.async_engine import Plan, plan
from engine.config import EngineConfig
from server.adapters import check_names


def report(config: EngineConfig, lengths: Sequence[int], served_names: Sequence[str] = ()) -> str:
    """Loads the model as serving would: only then are its shapes, the checks, the pool and its own name known.
    Raises StartError."""
    found = plan(config)
    check_names(config.lora.adapters, served_names or (found.info.name,))
    return render(found, lengths, [adapter.name for adapter in config.lora.adapters])


def render(found: Plan, lengths: Sequence[int], adapters: Sequence[str] = ()) -> str:
    """lengths: tokens per sequence (prompt and output) to tell the concurrency for; those above the longest
    sequence served are left out. adapters: their names."""
    info = found.info
    precision = info.dtype if info.quantization == "none" else f"{info.quantization} weights in {info.dtype}"
    rows = [
        ("model", f"{info.name} ({info.architecture}, {info.num_parameters / 1e6:.1f}M parameters, {precision})"),
        ("source", info.source),
        *([("adapters", ", ".join(adapters))] if adapters else []),
        ("weights", mebibytes(found.weight_bytes)),
        ("KV pool", mebibytes(found.kv_pool_bytes)),
        ("largest step", mebibytes(found.step_bytes)),
        ("KV per token", f"{info.kv_bytes_per_token} bytes"),
        ("blocks", f"{info.num_blocks} of {info.block_size} tokens = {found.num_pool_tokens} tokens"),
        ("longest sequence", f"{info.max_model_len} tokens"),
    ]
    fitting = sorted({length for length in lengths if length <= info.max_model_len} | {info.max_model_len})
    rows += [(f"at {length} tokens", f"{found.concurrent_sequences(length)} sequences at once") for length in fitting]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
