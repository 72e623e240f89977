"""Any allowed transformers causal LM as a `Computation`: its own modules over our attention.

The tree's attention modules call the hook of `attention_hook`, which finds this engine's layers on the module
itself.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.attention.base import AttentionBackend, LayerSpec, PagedLayer
from engine.config import StartError
from engine.models.adapted_tree import AdaptedLinear, CurrentForward, adapter_sites
from engine.models.allow import check_tree, expected_lookback, expected_softcap, one_line
from engine.models.attention_hook import CallRecorder, PagedCalls, RecordedCall
from engine.models.deltas import AdapterSpan, Site, Spans
from engine.models.rope_table import RopeTable

DRY_RUN_TOKENS = 3


class TreeModel:
    """A tree built for our attention implementation, weights in place, swapped or not."""

    quantization = "none"
    is_capturable = False  # who knows what modelling code does

    def __init__(self, tree: Any, backend: AttentionBackend) -> None:
        """Raises StartError if the tree attends in a way the paged cache cannot serve."""
        self.tree = tree
        self.vocab_size = int(tree.config.vocab_size)
        self.hidden_size = int(tree.config.hidden_size)
        self.dtype: torch.dtype = tree.get_input_embeddings().weight.dtype
        self.device: torch.device = tree.get_input_embeddings().weight.device
        self._keeps_logits = "logits_to_keep" in inspect.signature(tree.forward).parameters
        self._body = _body(tree)
        self._head = None if self._body is None else _without_body(tree, self._body)
        self.tells_hidden_states = self._body is not None
        self._tables = tuple(module for module in tree.modules() if isinstance(module, RopeTable))
        self._calls, self.layers = _attach(tree, backend)
        self._current = CurrentForward()

    @property
    def weight_bytes(self) -> int:
        own: int = sum(part.nbytes for part in (*self.tree.parameters(), *self.tree.buffers()))
        return own + sum(each.deltas.num_bytes for each in self.tree.modules() if isinstance(each, AdaptedLinear))

    def adapter_sites(self) -> list[Site]:
        """See Computation.adapter_sites."""
        return adapter_sites(self.tree, self._current)

    def finish_adapters(self, num_adapters: int) -> None:
        """See Computation.finish_adapters: a layer that one changes must see all tokens, whatever they are."""
        attached = {
            module: module.__dict__["paged_layer"]
            for module in self.tree.modules()
            if "paged_layer" in module.__dict__
        }
        self._current.num_tokens = DRY_RUN_TOKENS
        half = self.vocab_size // 2
        try:
            for adapter in range(1, num_adapters + 1):
                self._current.spans = (AdapterSpan(adapter, 0, DRY_RUN_TOKENS),)
                record_calls(self.tree, [half - place * half // DRY_RUN_TOKENS for place in range(DRY_RUN_TOKENS)])
        finally:
            self._current.spans = ()
            for module, calls in attached.items():
                module.paged_layer = calls

    def cover(self, num_positions: int) -> None:
        """Before a forward: rotary rows for positions [0, num_positions)."""
        for table in self._tables:
            table.cover(num_positions)

    def step_bytes(self, num_tokens: int, num_rows: int) -> int:
        """See Computation.step_bytes. What happens between the modules is not known: the logits alone."""
        return num_rows * self.vocab_size * torch.float32.itemsize

    def compute(self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor, spans: Spans = ()) -> Tensor:
        """See Backbone.forward."""
        self._begin(input_ids, spans)
        options: dict[str, Any] = {"logits_to_keep": logits_indices} if self._keeps_logits else {}
        output = self.tree(
            input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **options
        )
        logits = cast(Tensor, output.logits)[0]
        if not self._keeps_logits:
            logits = logits[logits_indices]
        return logits.float()

    def hidden_states(self, input_ids: Tensor, positions: Tensor, spans: Spans = ()) -> Tensor:
        """See Backbone.hidden_states."""
        self._begin(input_ids, spans)
        assert self._body is not None
        output = self._body(input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
        return cast(Tensor, output[0])[0]

    def _begin(self, input_ids: Tensor, spans: Spans) -> None:
        self._current.num_tokens, self._current.spans = len(input_ids), spans
        for calls in self._calls:
            calls.restart()

    def logits(self, hidden_states: Tensor) -> Tensor:
        """See Backbone.logits. The tree's own forward, for what it does around its head (scales, caps)."""
        assert self._head is not None
        if not len(hidden_states):
            return hidden_states.new_empty((0, self.vocab_size), dtype=torch.float32)
        output = self._head(inputs_embeds=hidden_states.unsqueeze(0), use_cache=False)
        return cast(Tensor, output.logits)[0].float()


def _body(tree: Any) -> nn.Module | None:
    """The child that makes the hidden states: the one that transformers names, or the only model among them."""
    children = dict(tree.named_children())
    if tree.base_model_prefix in children:
        return cast(nn.Module, children[tree.base_model_prefix])
    models = [child for child in children.values() if isinstance(child, PreTrainedModel)]
    return models[0] if len(models) == 1 else None


def _without_body(tree: Any, body: nn.Module) -> Any:
    """A tree of the same modules whose body hands on, as hidden states, what its forward gets as `inputs_embeds`."""
    stub = _HandsOn(inspect.signature(body.forward))
    head = copy.copy(tree)
    head._modules = {name: stub if child is body else child for name, child in tree.named_children()}
    return head


class _HandsOn(nn.Module):
    """Stands for a tree's body whose hidden states [1, num_rows, hidden_size] are known."""

    def __init__(self, signature: inspect.Signature) -> None:
        super().__init__()
        self._signature = signature

    def forward(self, *args: Any, **kwargs: Any) -> _GivenOutput:
        return _GivenOutput(self._signature.bind(*args, **kwargs).arguments["inputs_embeds"])


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
def record_calls(tree: Any, token_ids: Sequence[int] | None = None) -> list[RecordedCall]:
    """Every attention call of one forward, in order, with what the model reports about it. Leaves no trace.
    token_ids: DRY_RUN_TOKENS of them; None: any one."""
    recorder = CallRecorder()
    modules = list(tree.modules())
    for module in modules:
        module.paged_layer = recorder
    # One token at all positions, and not the first of the vocabulary: that pads, and its embedding may be zero.
    device = tree.get_input_embeddings().weight.device
    ids = torch.tensor([token_ids or [int(tree.config.vocab_size) // 2] * DRY_RUN_TOKENS], device=device)
    try:
        tree(input_ids=ids, position_ids=torch.arange(DRY_RUN_TOKENS, device=device).unsqueeze(0), use_cache=False)
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
