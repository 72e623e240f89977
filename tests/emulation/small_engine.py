"""A whole engine on the emulated kernels: a Llama of two layers, the scheduler, a runner, and csrc/cuda in between.

`use_kernels` points engine.ops and engine.device_ops to kernels of tests/ops; nothing else of the engine knows. The
model is told to compute as on a device (`writes_in_place`). `reference_logits` is the same model in plain torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine import device_ops, ops
from engine.attention.base import PagedLayer
from engine.attention.native import NativeAttention
from engine.batch import ScheduledBatch, StepOutput
from engine.config import SchedulerConfig
from engine.kv.cache import KVCache
from engine.kv.manager import KVCacheManager
from engine.models.backbone import Backbone
from engine.models.fused import FusedModel
from engine.models.fused_recipe import FusedRecipe, LayerRecipe
from engine.ops import ActivationKind
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Request
from tests.engine.recipes import PLAIN, draw_tensors
from tests.ops.device_kernels import LaunchedDeviceOps
from tests.ops.kernels import LaunchedOps

BLOCK, NUM_BLOCKS, MAX_LEN = 16, 40, 160
RECIPE = replace(PLAIN, num_query_heads=4, layers=(LayerRecipe(None, 0),) * 2)  # 2 kv heads
SAME_NAME = (
    "activation", "copy_blocks", "fused_add_rms_norm", "gather_blocks", "gelu_and_mul", "gelu_tanh_and_mul",
    "logprobs_of", "logprobs_topn", "paged_attention", "reshape_and_cache", "rms_norm", "scatter_blocks",
    "shape_logits", "silu_and_mul",
)  # fmt: skip
OF_THE_DEVICE = tuple(name for name in vars(LaunchedDeviceOps) if not name.startswith("_"))


# ---- the kernels in the ops' place ----------------------------------------------------------------------------


def use_kernels(monkeypatch: pytest.MonkeyPatch, launched: LaunchedOps) -> None:
    """Until the test ends, every op that the engine calls is one of csrc/cuda, but for edits by the CPU's sampler."""
    draw = ops.sample

    def pack_linear(weight: Tensor, *, gated: bool = False) -> Tensor:
        return weight

    def linear(
        x: Tensor,
        packed: Tensor,
        bias: Tensor | None,
        out_features: int,
        *,
        out_dtype: torch.dtype | None = None,
        activation: ActivationKind | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        assert packed.shape[0] == out_features * (1 if activation is None else 2)
        return launched.linear(x, packed, bias, out_dtype=out_dtype, activation=activation, residual=residual)

    def sample(*given: Tensor, source: Tensor | None = None, **edits: Any) -> Tensor:
        if any(edit is not None for edit in edits.values()):
            return draw(*given, source=source, **edits)
        return launched.sample(*given, source=source)

    for function in (pack_linear, linear, sample):
        monkeypatch.setattr(ops, function.__name__, function)
    for name in SAME_NAME:
        monkeypatch.setattr(ops, name, getattr(launched, name))
    device = LaunchedDeviceOps(launched)
    for name in OF_THE_DEVICE:
        monkeypatch.setattr(device_ops, name, getattr(device, name))


class BoundedAttention(NativeAttention):
    """As on a device: the bounds of the step's metadata are told, lengths are the kernel's to read."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: PagedLayer, *, scale: float,
        window: int | None = None, chunk: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        key_cache, value_cache, metadata = layer.attached()
        out = torch.full((*query.shape[:2], value_cache.shape[3]), torch.nan, dtype=query.dtype)
        bounds = metadata.max_query_len, metadata.max_seq_len
        num_bytes = device_ops.paged_attention_workspace(
            len(metadata.seq_lens), *bounds, query.shape[1], key_cache.shape[1], value_cache.shape[3]
        )
        device_ops.paged_attention_into(
            out, query, key_cache, value_cache, metadata.block_tables, metadata.query_start_loc, metadata.seq_lens,
            torch.full((num_bytes,), 0xFF, dtype=torch.uint8), scale=scale, max_query_len=bounds[0],
            max_seq_len=bounds[1], window=window, chunk=chunk, softcap=softcap, sinks=sinks,
        )  # fmt: skip
        return out


# ---- the model ------------------------------------------------------------------------------------------------


def tensors_of(dtype: torch.dtype) -> dict[str, Tensor]:
    return draw_tensors(RECIPE, dtype, hidden=64, intermediate=96)


def backbone_of(dtype: torch.dtype) -> Backbone:
    """After use_kernels."""
    model = FusedModel(RECIPE, tensors_of(dtype), BoundedAttention(), MAX_LEN + 1, stepwise=True)
    model.writes_in_place = True
    return Backbone(model, batch_invariant=True, num_parameters=0)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _rotated(heads: Tensor, recipe: FusedRecipe) -> Tensor:
    """heads: [num_tokens, heads, head_dim] at positions 0, 1, ..."""
    angles = torch.arange(len(heads)).double()[:, None] * torch.tensor(recipe.ropes[0].inv_freq).double()
    cos, sin = (torch.cat([f(angles)] * 2, 1).unsqueeze(1) for f in (torch.cos, torch.sin))
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat([-second, first], -1) * sin


def reference_logits(token_ids: Sequence[int], dtype: torch.dtype) -> Tensor:
    """[num_tokens, vocab]: the model in float64, its weights rounded to `dtype`, and nothing else."""
    weights = {name: tensor.double() for name, tensor in tensors_of(dtype).items()}
    eps = {name: norm.eps for name, norm in RECIPE.norms.items()}
    x = weights["model.embed_tokens.weight"][torch.tensor(token_ids)]
    for layer in range(len(RECIPE.layers)):
        here = f"model.layers.{layer}."

        def part(name: str, y: Tensor, here: str = here) -> Tensor:
            return y @ weights[f"{here}{name}.weight"].T

        y = _normed(x, weights[f"{here}input_layernorm.weight"], eps["input_layernorm"])
        query, key, value = (
            part(f"self_attn.{name}_proj", y).unflatten(1, (-1, RECIPE.head_dim)) for name in ("q", "k", "v")
        )
        heads = [part_.transpose(0, 1) for part_ in (_rotated(query, RECIPE), _rotated(key, RECIPE), value)]
        seen = functional.scaled_dot_product_attention(
            heads[0][None], heads[1][None], heads[2][None], is_causal=True, scale=RECIPE.scale, enable_gqa=True
        )
        x = x + part("self_attn.o_proj", seen[0].transpose(0, 1).flatten(1))
        y = _normed(x, weights[f"{here}post_attention_layernorm.weight"], eps["post_attention_layernorm"])
        x = x + part("mlp.down_proj", functional.silu(part("mlp.gate_proj", y)) * part("mlp.up_proj", y))
    return _normed(x, weights["model.norm.weight"], eps["norm"]) @ weights["lm_head.weight"].T


# ---- the engine -----------------------------------------------------------------------------------------------


class Handle(Protocol):
    def result(self) -> StepOutput: ...


class Runner(Protocol):
    def launch(self, batch: ScheduledBatch) -> Handle: ...


@dataclass
class Text:
    """What one choice of a request has got. num_cached: prompt tokens that came from the prefix cache."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_cached: int = 0

    @property
    def told(self) -> tuple[list[int], list[float]]:
        return self.token_ids, self.logprobs


class SmallEngine:
    """The loop of engine/loop.py without its thread: one scheduler over one runner, steps in flight up to `depth`."""

    def __init__(self, runner: Runner, *, budget: int = 256, chunk: int = 64, depth: int = 1) -> None:
        config = SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=budget, max_chunk_tokens=chunk, pipeline_depth=depth
        )
        self.scheduler = Scheduler(config, KVCacheManager(NUM_BLOCKS, BLOCK), MAX_LEN)
        self.runner, self.depth = runner, depth
        self.batches: list[ScheduledBatch] = []
        self._texts: dict[tuple[int, int], Text] = {}  # by request and choice
        self._in_flight: deque[tuple[ScheduledBatch, Handle]] = deque()

    def run(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Text]:
        """All at once, to their ends: every request's choices, one request after the other."""
        self._texts.clear()
        for i, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            seed = 0 if each.seed is None else each.seed
            self.scheduler.add(Request(i, 0, list(prompt), each, seed=seed))
            self._texts |= {(i, choice): Text() for choice in range(each.n)}
        while self.scheduler.has_work:
            batch = self.scheduler.schedule(0.0)
            if batch is not None:
                self.batches.append(batch)
                self._in_flight.append((batch, self.runner.launch(batch)))
            if batch is None or len(self._in_flight) >= self.depth:
                self._take(*self._in_flight.popleft())
        return list(self._texts.values())

    def _take(self, batch: ScheduledBatch, handle: Handle) -> None:
        for stream, outputs in self.scheduler.update(batch, handle.result(), 0.0).outputs:
            for output in outputs:
                assert output.error is None
                text = self._texts[stream, output.choice_index]
                text.token_ids += output.token_ids
                text.logprobs += output.logprobs
                text.num_cached = max(text.num_cached, output.num_cached_tokens)


def cache_for(backbone: Backbone) -> KVCache:
    """Every slot that nobody has written holds NaN."""
    cache = KVCache(backbone.layers, NUM_BLOCKS, BLOCK, backbone.dtype)
    for buffer in cache.buffers:
        buffer.fill_(0xFF)
    return cache
