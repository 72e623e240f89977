"""Any allowed transformers causal LM as a `Computation`: its own modules over our attention.

The tree's attention modules call the hook of `attention_hook`, which finds this engine's layers on the module
itself.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.attention.base import AttentionBackend, LayerSpec, PagedLayer
from engine.config import StartError
from engine.models.allow import check_tree, expected_lookback, expected_softcap, one_line
from engine.models.attention_hook import CallRecorder, PagedCalls, RecordedCall
from engine.models.rope_table import RopeTable

DRY_RUN_TOKENS = 3


class TreeModel:
    """A tree built for our attention implementation, weights in place, swapped or not."""

    def __init__(self, tree: Any, backend: AttentionBackend) -> None:
        """Raises StartError if the tree attends in a way the paged cache cannot serve."""
        self.tree = tree
        self.vocab_size = int(tree.config.vocab_size)
        self.hidden_size = int(tree.config.hidden_size)
        self.dtype: torch.dtype = tree.get_input_embeddings().weight.dtype
        self._keeps_logits = "logits_to_keep" in inspect.signature(tree.forward).parameters
        self._body_name = _body_name(tree)
        self._tables = tuple(module for module in tree.modules() if isinstance(module, RopeTable))
        self._calls, self.layers = _attach(tree, backend)

    def cover(self, num_positions: int) -> None:
        """Before a forward: rotary rows for positions [0, num_positions)."""
        for table in self._tables:
            table.cover(num_positions)

    def compute(self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor) -> Tensor:
        """See Backbone.forward."""
        for calls in self._calls:
            calls.restart()
        options: dict[str, Any] = {"logits_to_keep": logits_indices} if self._keeps_logits else {}
        output = self.tree(
            input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **options
        )
        logits = cast(Tensor, output.logits)[0]
        if not self._keeps_logits:
            logits = logits[logits_indices]
        return logits.float()

    def hidden_states(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """See Backbone.hidden_states."""
        for calls in self._calls:
            calls.restart()
        body = getattr(self.tree, self._body_name)
        output = body(input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
        return cast(Tensor, output[0])[0]

    def logits(self, hidden_states: Tensor) -> Tensor:
        """See Backbone.logits. The tree's own forward, for what it does around its head (scales, caps)."""
        if not len(hidden_states):
            return hidden_states.new_empty((0, self.vocab_size), dtype=torch.float32)
        body = getattr(self.tree, self._body_name)
        setattr(self.tree, self._body_name, _Given(hidden_states.unsqueeze(0)))
        try:
            output = self.tree(input_ids=torch.zeros(1, len(hidden_states), dtype=torch.int64), use_cache=False)
        finally:
            setattr(self.tree, self._body_name, body)
        return cast(Tensor, output.logits)[0].float()


def _body_name(tree: Any) -> str:
    """The child that makes the hidden states. Raises StartError without one."""
    names = [name for name, child in tree.named_children() if isinstance(child, PreTrainedModel)]
    if len(names) != 1:
        raise StartError(f"Model type {tree.config.model_type!r} has no body apart from its head.")
    return str(names[0])


class _Given(nn.Module):
    """Stands for a tree's body whose hidden states [1, num_rows, hidden_size] are known."""

    def __init__(self, hidden_states: Tensor) -> None:
        super().__init__()
        self._output = _GivenOutput(hidden_states)

    def forward(self, *args: Any, **kwargs: Any) -> _GivenOutput:
        return self._output


class _GivenOutput:
    """A body's output; each family has fields of its own, absent here."""

    def __init__(self, hidden_states: Tensor) -> None:
        self.last_hidden_state = hidden_states

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def _attach(tree: Any, backend: AttentionBackend) -> tuple[tuple[PagedCalls, ...], tuple[PagedLayer, ...]]:
    """Find every attention call by a dry run and hang its paged layer on the calling module."""
    recorded = record_calls(tree)
    check_tree(tree.config, tree, len(recorded))
    specs = resolve_specs(tree.config, recorded)
    layers = tuple(PagedLayer(index, spec) for index, spec in enumerate(specs))
    by_module: dict[nn.Module, list[PagedLayer]] = {}
    for call, layer in zip(recorded, layers, strict=True):
        by_module.setdefault(call.module, []).append(layer)
    all_calls = []
    for module, own in by_module.items():
        calls = PagedCalls(backend, tuple(own))
        module.paged_layer = calls  # type: ignore[assignment]  # a plain object, not a submodule
        all_calls.append(calls)
    return tuple(all_calls), layers


@torch.inference_mode()
def record_calls(tree: Any) -> list[RecordedCall]:
    """Every attention call of one forward, in order, with what the model reports about it. Leaves no trace."""
    recorder = CallRecorder()
    modules = list(tree.modules())
    for module in modules:
        module.paged_layer = recorder
    ids = torch.zeros(1, DRY_RUN_TOKENS, dtype=torch.int64)
    try:
        tree(input_ids=ids, position_ids=torch.arange(DRY_RUN_TOKENS).unsqueeze(0), use_cache=False)
    except StartError:
        raise
    except Exception as error:  # modelling code that insists on its own cache fails in any way it likes
        raise StartError(
            f"Model type {tree.config.model_type!r} does not run over a foreign cache "
            f"({type(error).__name__}: {one_line(error)})."
        ) from error
    finally:
        for module in modules:
            del module.paged_layer
    return recorder.calls


def resolve_specs(config: Any, recorded: list[RecordedCall]) -> list[LayerSpec]:
    """What the model reported, completed from config.json where it reports nothing (chunks and some windows
    travel only in transformers' masks, which are off).

    Raises StartError if a report contradicts config.json."""
    softcap = expected_softcap(config)
    specs = []
    for index, (call, (window, chunk)) in enumerate(
        zip(recorded, expected_lookback(config, len(recorded)), strict=True)
    ):
        spec = call.spec
        if spec.window is not None and spec.window != window:
            raise StartError(f"Layer {index} attends over a window of {spec.window}, config.json implies {window}.")
        if spec.softcap != softcap:
            raise StartError(f"Layer {index} caps scores at {spec.softcap}, config.json implies {softcap}.")
        if spec.has_sinks != (isinstance(getattr(call.module, "sinks", None), Tensor)):
            raise StartError(f"Layer {index} has attention sinks that do not reach the attention call.")
        specs.append(
            LayerSpec(
                num_query_heads=spec.num_query_heads,
                num_kv_heads=spec.num_kv_heads,
                key_dim=spec.key_dim,
                value_dim=spec.value_dim,
                window=window,
                chunk=chunk,
                softcap=spec.softcap,
                has_sinks=spec.has_sinks,
            )
        )
    return specs
