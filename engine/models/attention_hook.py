"""Our attention as transformers sees it: one stateless function, registered once under one name.

The registry is class-global, so the function holds nothing. It reads `module.paged_layer`, a plain object that
one engine hung on that attention module, and asks it to attend; two engines in one process never meet. The
name stays out of the mask registry: unregistered names make the mask builders return None at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from engine.attention.base import AttentionBackend, LayerSpec, PagedLayer
from engine.config import StartError

IMPLEMENTATION = "pagemill"
# Keyword tensors that carry nothing our own metadata does not carry.
HARMLESS_TENSORS = frozenset({"position_ids", "cache_position", "position_embeddings", "s_aux", "sinks"})


class AttentionCalls(Protocol):
    """What hangs on a module as `paged_layer`."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,  # [1, num_query_heads, num_tokens, key_dim]
        key: Tensor,  # [1, num_kv_heads, num_tokens, key_dim]
        value: Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
        scale: float,
        options: Mapping[str, Any],
    ) -> Tensor: ...  # [1, num_tokens, num_query_heads, value_dim]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    calls = cast(AttentionCalls, module.paged_layer)
    return calls.attend(module, query, key, value, scale, options), None


def register() -> None:
    """Put the hook into transformers' registry. Idempotent."""
    AttentionInterface.register(IMPLEMENTATION, _attention)


def select_implementation(tree: Any, name: str) -> None:
    """Switch a tree to attention implementation `name`. Raises StartError where transformers only warns."""
    tree.set_attn_implementation(name)
    if tree.config._attn_implementation != name:
        raise StartError(f"Model type {tree.config.model_type!r} refused the attention implementation {name!r}.")


class PagedCalls:
    """The attention calls of one module per forward, in order; almost always one.

    A module that is called several times per forward (looped models) has a cache of its own per call."""

    __slots__ = ("_backend", "_next", "layers")

    def __init__(self, backend: AttentionBackend, layers: tuple[PagedLayer, ...]) -> None:
        self.layers = layers
        self._backend = backend
        self._next = 0

    def restart(self) -> None:
        """Before a forward: the next call is the module's first."""
        self._next = 0

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        options: Mapping[str, Any],
    ) -> Tensor:
        layer = self.layers[self._next]
        self._next += 1
        spec = layer.spec
        output = self._backend.forward(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            layer,
            scale=scale,
            window=spec.window,
            chunk=spec.chunk,
            softcap=spec.softcap,
            sinks=_sinks(options) if spec.has_sinks else None,
        )
        return output.unsqueeze(0)


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One attention call seen in the dry run: what the model itself reported.

    keys: [num_kv_heads, num_tokens, key_dim], as they reached attention."""

    module: nn.Module
    spec: LayerSpec
    scale: float
    keys: Tensor


class CallRecorder:
    """Hangs on every module during the dry run; answers zeros, which have the right shape and no cost.

    Raises StartError for anything the paged op cannot carry."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        options: Mapping[str, Any],
    ) -> Tensor:
        _refuse_what_is_lost(module, query, key, options)
        sinks = _sinks(options)
        if sinks is not None and sinks.shape != (query.shape[1],):
            raise StartError(f"{type(module).__name__} uses attention sinks of shape {tuple(sinks.shape)}.")
        window = options.get("sliding_window")
        softcap = options.get("softcap")
        spec = LayerSpec(
            num_query_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=query.shape[-1],
            value_dim=value.shape[-1],
            window=None if window is None else int(window),
            softcap=None if softcap is None else float(softcap),
            has_sinks=sinks is not None,
        )
        self.calls.append(RecordedCall(module, spec, float(scale), key[0].clone()))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])


def _refuse_what_is_lost(module: nn.Module, query: Tensor, key: Tensor, options: Mapping[str, Any]) -> None:
    kind = type(module).__name__
    if query.shape[2] != key.shape[2]:
        raise StartError(f"{kind} attends over keys of another length than its queries, which is not supported.")
    is_causal = options.get("is_causal")
    if (getattr(module, "is_causal", True) if is_causal is None else is_causal) is False:
        raise StartError(f"{kind} is not causal; only decoder-only language models are served.")
    for name, value in options.items():
        if isinstance(value, Tensor) and name not in HARMLESS_TENSORS:
            raise StartError(f"{kind} passes {name!r} to attention, which the paged cache cannot use.")


def _sinks(options: Mapping[str, Any]) -> Tensor | None:
    sinks = options.get("s_aux")
    return cast("Tensor | None", options.get("sinks") if sinks is None else sinks)
