"""What a decoder of the Llama shape is, its weights apart: a `FusedRecipe`, readable from JSON.

Shape: embedding, layers of attention and MLP around a residual stream, norm, head. A norm may stand before or behind
each half, or both; heads may be normed, rotated in part or not at all. Knows the names of a checkpoint's tensors, not
what computes with them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from engine.ops import ActivationKind, NormVariant

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


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
ROUTER = "mlp.gate"
JOINED_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")  # tensors of all experts of a layer, in a tree
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def mixtral_name(name: str) -> str:
    """What a tensor of a mixture of experts is called in Mixtral's checkpoints."""
    path, dot, last = name.removesuffix(".weight").rpartition(".")
    if ".mlp.experts." in path:
        last = _MIXTRAL.get(last, last)
    return f"{path}{dot}{last}.weight".replace(".mlp.", ".block_sparse_moe.")


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
    """window: tokens a query sees, None for all; rope: index into FusedRecipe.ropes, None for no rotation."""

    window: int | None
    rope: int | None


@dataclass(frozen=True, slots=True)
class ExpertsRecipe:
    """A mixture of experts in every layer: `num_chosen` of `count` by the softmax of a router, their weights divided
    by their sum if is_normalised."""

    count: int
    num_chosen: int
    is_normalised: bool


@dataclass(frozen=True, slots=True)
class FusedRecipe:
    """norms: by the module's name within its layer (or within its attention), "norm" for the last one. qkv: the
    layers whose rows, one after another, are that product's. experts: what stands in the MLP's place, which is then
    every expert's, split. softcap: of attention scores. Scales and caps that
    are None do nothing; residual_scale is on what each half adds to the residual stream."""

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

    @property
    def parts(self) -> tuple[str, ...]:
        """The modules of a layer that have weights, by their names within it."""
        qk_norms = QK_NORMS if self.has_qk_norms else ()
        attention = (*self.places.names(), *qk_norms, *self.qkv, OUTPUT)
        if self.experts is None:
            return (*attention, *self.mlp.first, self.mlp.down)
        experts = [f"mlp.experts.{i}.{m}_proj" for i in range(self.experts.count) for m in ("gate", "up", "down")]
        return (*attention, ROUTER, *experts)

    def tensor_names(self) -> list[str]:
        """Of all tensors that the recipe needs; biases may come beside them."""
        parts = self.parts
        in_layers = [f"model.layers.{index}.{part}.weight" for index in range(len(self.layers)) for part in parts]
        return [EMBEDDING, *in_layers, FINAL_NORM, *([] if self.is_tied else [HEAD])]

    def fits(self, names: Collection[str]) -> bool:
        """True if a checkpoint has every tensor the recipe needs, under names that `fused.py` finds."""
        return all(name in names or mixtral_name(name) in names for name in self.tensor_names())

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
                "mlp": MlpNames(tuple(values["mlp"][0]), *values["mlp"][1:]),
                "experts": None if values["experts"] is None else ExpertsRecipe(**values["experts"]),
            }
        )
