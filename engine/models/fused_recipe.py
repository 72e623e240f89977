"""What a decoder of the Llama shape is, its weights apart: a `FusedRecipe`, readable from JSON.

Shape: embedding, layers of attention and MLP around a residual stream, norm, head. A norm may stand before or behind
each half, or both; heads may be normed, rotated in part or not at all. Knows the names of a checkpoint's tensors, not
what computes with them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from engine.models.tensor_names import CHOOSING, DIALECTS
from engine.ops import ActivationKind, NormVariant

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
HEAD_BIAS = "lm_head.bias"


class NormPlaces(NamedTuple):
    """The norms of a layer by where they stand; None: there is none. Those behind a half stand before its residual
    sum."""

    input: str | None
    behind_attention: str | None
    middle: str | None
    behind_mlp: str | None

    def names(self) -> tuple[str, ...]:
        return tuple(name for name in self if name is not None)


PRE_NORMS = NormPlaces("input_layernorm", None, "post_attention_layernorm", None)
SANDWICH_NORMS = NormPlaces(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
POST_NORMS = NormPlaces(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
GLM_NORMS = NormPlaces("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
PARALLEL_NORM = NormPlaces("input_layernorm", None, None, None)  # both halves read what it makes
PLACES = (PRE_NORMS, SANDWICH_NORMS, POST_NORMS, GLM_NORMS, PARALLEL_NORM)
QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
SPLIT_QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")
JOINED_QKV = ("self_attn.qkv_proj",)
OUTPUT = "self_attn.o_proj"


class MlpNames(NamedTuple):
    """first: the layers whose rows, one after another, are the first product's: a gate's and as many others, or
    without a gate what the activation is applied to."""

    first: tuple[str, ...]
    down: str
    is_gated: bool


SPLIT_GATE_UP = MlpNames(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", True)
JOINED_GATE_UP = MlpNames(("mlp.gate_up_proj",), "mlp.down_proj", True)
UNGATED = MlpNames(("mlp.up_proj",), "mlp.down_proj", False)
UNGATED_CONVOLVED = MlpNames(("mlp.c_fc",), "mlp.c_proj", False)
MLPS = (SPLIT_GATE_UP, JOINED_GATE_UP, UNGATED, UNGATED_CONVOLVED)
ROUTER, CORRECTION, SHARED_GATE = "mlp.gate", f"mlp.gate.{CHOOSING}", "mlp.shared_expert_gate"
JOINED_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")  # tensors of all experts of a layer, in a tree
_SHARED = "mlp.shared_experts"
SHARED_MLPS = (
    MlpNames((f"{_SHARED}.gate_proj", f"{_SHARED}.up_proj"), f"{_SHARED}.down_proj", True),
    MlpNames((f"{_SHARED}.gate_up_proj",), f"{_SHARED}.down_proj", True),
)


@dataclass(frozen=True, slots=True)
class NormRecipe:
    eps: float
    variant: NormVariant


@dataclass(frozen=True, slots=True)
class RopeRecipe:
    """inv_freq: rotary_dim / 2 frequencies, of the first rotary_dim elements of a head; scaling: factor on cos and
    sin. is_interleaved: an element is rotated with its neighbour, not with the one half of rotary_dim away."""

    inv_freq: tuple[float, ...]
    scaling: float
    is_interleaved: bool = False


@dataclass(frozen=True, slots=True)
class LayerRecipe:
    """window: tokens a query sees, None for all; rope: index into FusedRecipe.ropes, None for no rotation. is_dense:
    an MLP where other layers have experts."""

    window: int | None
    rope: int | None
    is_dense: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsRecipe:
    """A mixture of `count` experts, gate and up split. The router's largest num_chosen scores choose, where
    has_correction after a number per expert is added that does nothing else. scores: softmax over all experts, or a
    sigmoid each. An expert's weight is its score, divided by the sum of those chosen if is_normalised, and times
    `scaling`. shared: the MLP that every token passes beside them, let through by the sigmoid of one product if
    has_shared_gate. is_exact: the router's weight is in float32, whatever the others are in."""

    count: int
    num_chosen: int
    is_normalised: bool
    scores: Literal["softmax", "sigmoid"] = "softmax"
    scaling: float = 1.0
    has_correction: bool = False
    shared: MlpNames | None = None
    has_shared_gate: bool = False
    is_exact: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """The modules of a layer that have weights, by their names within it."""
        experts = [f"mlp.experts.{i}.{m}_proj" for i in range(self.count) for m in ("gate", "up", "down")]
        shared = () if self.shared is None else (*self.shared.first, self.shared.down)
        return (ROUTER, *experts, *shared, *((SHARED_GATE,) if self.has_shared_gate else ()))


@dataclass(frozen=True, slots=True)
class FusedRecipe:
    """norms: by the module's name within its layer (or within its attention), "norm" for the last one. qkv: the
    layers whose rows, one after another, are that product's. experts: what stands in the MLP's place, in layers that
    are not dense. qkv_by_head: a joined product's rows are q, k and v of one head after another, as many of each.
    has_parallel_halves: both halves read the residual stream as the layer found it, each through a norm of its own.
    softcap: of attention scores. Scales and caps that are None do nothing; residual_scale is on what each half adds to
    the residual stream."""

    vocab_size: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    activation: ActivationKind
    embedding_scale: float | None
    is_tied: bool
    norms: dict[str, NormRecipe]
    ropes: tuple[RopeRecipe, ...]
    layers: tuple[LayerRecipe, ...]
    residual_scale: float | None = None
    logits_scale: float | None = None
    logits_softcap: float | None = None
    qkv: tuple[str, ...] = SPLIT_QKV
    mlp: MlpNames = SPLIT_GATE_UP
    experts: ExpertsRecipe | None = None
    qkv_by_head: bool = False
    has_parallel_halves: bool = False

    @property
    def is_parallel(self) -> bool:
        """The MLP does not read what attention left."""
        return self.has_parallel_halves or self.places == PARALLEL_NORM

    @property
    def places(self) -> NormPlaces:
        """Raises KeyError if `norms` are none of PLACES."""
        for places in PLACES:
            if set(places.names()) == self.norms.keys() - {"norm", "q_norm", "k_norm"}:
                return places
        raise KeyError(f"no such places: {sorted(self.norms)}")

    @property
    def has_qk_norms(self) -> bool:
        return "q_norm" in self.norms

    def parts(self, layer: LayerRecipe) -> tuple[str, ...]:
        """The modules of a layer that have weights, by their names within it."""
        qk_norms = QK_NORMS if self.has_qk_norms else ()
        attention = (*self.places.names(), *qk_norms, *self.qkv, OUTPUT)
        if self.experts is None or layer.is_dense:
            return (*attention, *self.mlp.first, self.mlp.down)
        return (*attention, *self.experts.parts)

    def tensor_names(self) -> list[str]:
        """Of all tensors that the recipe needs; biases may come beside them."""
        names = [EMBEDDING]
        for index, layer in enumerate(self.layers):
            path = f"model.layers.{index}"
            names += [f"{path}.{part}.weight" for part in self.parts(layer)]
            if self.experts is not None and self.experts.has_correction and not layer.is_dense:
                names.append(f"{path}.{CORRECTION}")
        return [*names, FINAL_NORM, *([] if self.is_tied else [HEAD])]

    def fits(self, names: Collection[str]) -> bool:
        """True if a checkpoint has every tensor the recipe needs, under names that `fused.py` finds."""
        wanted = self.tensor_names()
        return any(all(dialect.theirs(name) in names for name in wanted) for dialect in DIALECTS)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> FusedRecipe:
        """Raises TypeError, KeyError or AttributeError if `values` is not what to_json wrote."""
        return cls(
            **{
                **values,
                "norms": {name: NormRecipe(**norm) for name, norm in values["norms"].items()},
                "ropes": tuple(RopeRecipe(**rope | {"inv_freq": tuple(rope["inv_freq"])}) for rope in values["ropes"]),
                "layers": tuple(LayerRecipe(**layer) for layer in values["layers"]),
                "qkv": tuple(values["qkv"]),
                "mlp": _mlp_from_json(values["mlp"]),
                "experts": None if values["experts"] is None else _experts_from_json(values["experts"]),
            }
        )


def _mlp_from_json(values: Sequence[Any]) -> MlpNames:
    return MlpNames(tuple(values[0]), *values[1:])


def _experts_from_json(values: Mapping[str, Any]) -> ExpertsRecipe:
    shared = values["shared"]
    return ExpertsRecipe(**{**values, "shared": None if shared is None else _mlp_from_json(shared)})
