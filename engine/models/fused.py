"""The fast path: a decoder of the Llama shape in few native calls per layer, and no transformers.

A `FusedRecipe` says everything but the weights; `recipe.py` derives it from a transformers tree, and the self-check
proves it on every model before it is used. Kept with the verdict in the user's cache, it lets a later start go from
weights to model without importing modelling code.

Shape: embedding, layers of attention and gated MLP around a residual stream, norm, head. Norms stand before each
half ("input_layernorm", "post_attention_layernorm"), or before and behind it (with "pre_feedforward_layernorm" and
"post_feedforward_layernorm"). Whatever else a model does, it is no recipe.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine import ops
from engine.attention.base import AttentionBackend, LayerSpec, PagedLayer
from engine.config import StartError
from engine.models.native_decoder import DecoderShape, LayerTensors, NativeDecoder
from engine.models.quantised import QuantisedWeight, join
from engine.models.quantiser import Quantiser
from engine.models.rope_table import RopeTable
from engine.ops import ActivationKind, NormVariant

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
LAYER_NORMS = (*PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
LINEARS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


@dataclass(frozen=True, slots=True)
class NormRecipe:
    eps: float
    variant: NormVariant


@dataclass(frozen=True, slots=True)
class RopeRecipe:
    """inv_freq: head_dim / 2 frequencies; scaling: factor on cos and sin."""

    inv_freq: tuple[float, ...]
    scaling: float


@dataclass(frozen=True, slots=True)
class LayerRecipe:
    """window: tokens a query sees, None for all; rope: index into FusedRecipe.ropes."""

    window: int | None
    rope: int


@dataclass(frozen=True, slots=True)
class FusedRecipe:
    """norms: by the module's name within its layer, "norm" for the last one."""

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

    @property
    def is_sandwiched(self) -> bool:
        return "pre_feedforward_layernorm" in self.norms

    def fits(self, names: Collection[str]) -> bool:
        """True if a checkpoint has every tensor the recipe needs, under the tree's own names."""
        in_layer = [name if name in LAYER_NORMS else f"self_attn.{name}" for name in self.norms if name != "norm"]
        wanted = [f"model.layers.{i}.{part}.weight" for i in range(len(self.layers)) for part in (*in_layer, *LINEARS)]
        return set(names).issuperset([*wanted, EMBEDDING, FINAL_NORM, *([] if self.is_tied else [HEAD])])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> FusedRecipe:
        """Raises TypeError, KeyError or AttributeError if `values` is not what to_json wrote."""
        return cls(
            **{
                **values,
                "norms": {name: NormRecipe(**norm) for name, norm in values["norms"].items()},
                "ropes": tuple(RopeRecipe(tuple(rope["inv_freq"]), rope["scaling"]) for rope in values["ropes"]),
                "layers": tuple(LayerRecipe(**layer) for layer in values["layers"]),
            }
        )


class _Frequencies(nn.Module):
    """Fills a RopeTable. sin carries the sign of the rotation: the first half is negated."""

    def __init__(self, rope: RopeRecipe) -> None:
        super().__init__()
        self._inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32)
        self._scaling = rope.scaling

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self._inv_freq
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        return torch.cat([cos, cos], -1).to(x.dtype), torch.cat([-sin, sin], -1).to(x.dtype)


def _rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """heads: [num_tokens, num_heads, head_dim]. Two products and a sum, rounded one by one as transformers does."""
    cos, sin = rotation
    return (heads * cos).add_(heads.roll(heads.shape[-1] // 2, -1).mul_(sin))


class _Norm:
    def __init__(self, weight: Tensor, recipe: NormRecipe) -> None:
        self.weight, self._eps, self._variant = weight, recipe.eps, recipe.variant

    def __call__(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self._eps, self._variant)

    def after_adding(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual += x, then the norm of the sum."""
        return ops.fused_add_rms_norm(x, residual, self.weight, self._eps, self._variant)


class _Linear:
    """PackedLinear without a module's overhead: x [num_tokens, in_features].

    gate: weight's rows are a gate's and then another half's; the result is activation(gate) * half."""

    def __init__(
        self,
        weight: Tensor | QuantisedWeight,
        bias: Tensor | None,
        *,
        out_dtype: torch.dtype | None = None,
        gate: ActivationKind | None = None,
    ) -> None:
        num_rows, self.in_features = weight.shape
        self.is_quantised = isinstance(weight, QuantisedWeight)
        self.bias, self._out_dtype, self._gate = bias, out_dtype, gate
        self.out_features = num_rows if gate is None else num_rows // 2
        if isinstance(weight, QuantisedWeight):
            self.packed = weight.pack(gated=gate is not None)
            self.bias = None if bias is None else bias.float()
        else:
            self.packed = ops.pack_linear(weight, gated=gate is not None)

    def __call__(self, x: Tensor) -> Tensor:
        multiply = ops.linear_quant if self.is_quantised else ops.linear
        return multiply(x, self.packed, self.bias, self.out_features, out_dtype=self._out_dtype, activation=self._gate)

    @property
    def num_bytes(self) -> int:
        return self.packed.nbytes + (0 if self.bias is None else self.bias.nbytes)


class _Weights:
    """Checkpoint tensors by name, as the parts of a layer.

    num_bytes: of what was made so far. kinds: the forms of its linear layers' weights."""

    def __init__(self, tensors: Mapping[str, Tensor], recipe: FusedRecipe, quantiser: Quantiser | None) -> None:
        self._tensors, self._recipe, self._quantiser = tensors, recipe, quantiser
        self.num_bytes = 0
        self.kinds: set[str] = set()

    def tensor(self, name: str) -> Tensor:
        try:
            return self._tensors[name].detach()
        except KeyError as error:
            raise StartError(f"The weights lack the tensor {name}.") from error

    def linear(self, *names: str, gate: ActivationKind | None = None) -> _Linear:
        """One packed product of several layers' rows."""
        has_bias = f"{names[0]}.bias" in self._tensors
        bias = torch.cat([self.tensor(f"{name}.bias") for name in names]) if has_bias else None
        return self._packed(_Linear(self._matrix(*(f"{name}.weight" for name in names)), bias, gate=gate))

    def head(self) -> _Linear:
        """Of float32 logits."""
        name = EMBEDDING if self._recipe.is_tied else HEAD
        return self._packed(_Linear(self._matrix(name, is_head=True), None, out_dtype=torch.float32))

    def embedding(self, head: _Linear) -> Tensor:
        """The table [vocab_size, hidden_size], or the packed weight of which ops.embed_quant reads rows: the head's
        own if they are one tensor."""
        if self._recipe.is_tied:
            return head.packed if head.is_quantised else self.copy(EMBEDDING)
        quantised = None if self._quantiser is None else self._quantiser.weight(EMBEDDING, is_head=True)
        if quantised is None:
            return self.copy(EMBEDDING)
        packed = quantised.pack()
        self.num_bytes += packed.nbytes
        return packed

    def _packed(self, linear: _Linear) -> _Linear:
        self.num_bytes += linear.num_bytes
        return linear

    def _matrix(self, *names: str, is_head: bool = False) -> Tensor | QuantisedWeight:
        """The rows of several matrices: quantised if all are to be."""
        quantised = [] if self._quantiser is None else [self._quantiser.weight(n, is_head=is_head) for n in names]
        known = [weight for weight in quantised if weight is not None]
        if len(known) == len(names):
            joined = join(known)
            self.kinds.add(f"int{joined.bits}")
            return joined
        parts = [self.tensor(name) for name in names]
        self.kinds.add(str(parts[0].dtype).removeprefix("torch."))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def copy(self, name: str) -> Tensor:
        """Of a tensor: a view would keep the whole file mapped after all else is packed."""
        copied = self.tensor(name).clone()
        self.num_bytes += copied.nbytes
        return copied

    def norm(self, path: str) -> _Norm:
        return _Norm(self.copy(f"{path}.weight"), self._recipe.norms[path.rpartition(".")[2]])

    def norm_or_none(self, path: str) -> _Norm | None:
        return self.norm(path) if path.rpartition(".")[2] in self._recipe.norms else None


class _Layer:
    """One decoder layer over the residual stream."""

    def __init__(self, weights: _Weights, path: str, recipe: FusedRecipe, layer: PagedLayer, rope: int) -> None:
        self.layer, self.rope = layer, rope
        self._recipe = recipe
        self.input_norm = weights.norm(f"{path}.input_layernorm")
        behind_attention = weights.norm(f"{path}.post_attention_layernorm")
        self._attention_norm = behind_attention if recipe.is_sandwiched else None
        self.middle_norm = (
            weights.norm(f"{path}.pre_feedforward_layernorm") if recipe.is_sandwiched else behind_attention
        )
        self._mlp_norm = weights.norm_or_none(f"{path}.post_feedforward_layernorm")
        attention = f"{path}.self_attn"
        self._query_norm = weights.norm_or_none(f"{attention}.q_norm")
        self._key_norm = weights.norm_or_none(f"{attention}.k_norm")
        self._qkv = weights.linear(*(f"{attention}.{name}_proj" for name in "qkv"))
        self._output = weights.linear(f"{attention}.o_proj")
        self._gate_up = weights.linear(f"{path}.mlp.gate_proj", f"{path}.mlp.up_proj", gate=recipe.activation)
        self._down = weights.linear(f"{path}.mlp.down_proj")

    @property
    def intermediate_size(self) -> int:
        return self._down.in_features

    def tensors(self) -> LayerTensors:
        """As the native decoder wants them."""
        norms = (
            self.input_norm,
            self._attention_norm,
            self.middle_norm,
            self._mlp_norm,
            self._query_norm,
            self._key_norm,
        )
        products = (self._qkv, self._output, self._gate_up, self._down)
        return LayerTensors._make(
            [
                *(None if norm is None else norm.weight for norm in norms),
                *(tensor for product in products for tensor in (product.packed, product.bias)),
            ]
        )

    def attend(self, x: Tensor, rotation: tuple[Tensor, Tensor], backend: AttentionBackend) -> Tensor:
        recipe = self._recipe
        num_query, num_kv = recipe.num_query_heads, recipe.num_kv_heads
        heads = self._qkv(x).view(-1, num_query + 2 * num_kv, recipe.head_dim)
        if self._query_norm is not None and self._key_norm is not None:
            query = _rotate(self._query_norm(heads[:, :num_query]), rotation)
            key = _rotate(self._key_norm(heads[:, num_query : num_query + num_kv]), rotation)
        else:
            rotated = _rotate(heads[:, : num_query + num_kv], rotation)
            query, key = rotated[:, :num_query], rotated[:, num_query:]
        spec = self.layer.spec
        output = backend.forward(
            query,
            key,
            heads[:, num_query + num_kv :],
            self.layer,
            scale=recipe.scale,
            window=spec.window,
            softcap=spec.softcap,
        )
        result = self._output(output.view(x.shape[0], -1))
        return result if self._attention_norm is None else self._attention_norm(result)

    def feed_forward(self, x: Tensor) -> Tensor:
        result = self._down(self._gate_up(x))
        return result if self._mlp_norm is None else self._mlp_norm(result)


class FusedModel:
    """A recipe with its weights: what `Backbone` computes with."""

    tells_hidden_states = True

    def __init__(
        self,
        recipe: FusedRecipe,
        tensors: Mapping[str, Tensor],
        backend: AttentionBackend,
        max_positions: int,
        quantiser: Quantiser | None = None,
    ) -> None:
        """tensors: by transformers' names, all of one dtype. quantiser: of linear layers' weights; None: none is
        quantised. Raises StartError if a tensor is missing."""
        weights = _Weights(tensors, recipe, quantiser)
        self._final_norm = weights.norm("model.norm")
        self.vocab_size = recipe.vocab_size
        (self.hidden_size,) = self._final_norm.weight.shape
        self.dtype = self._final_norm.weight.dtype
        self._backend = backend
        scale = recipe.embedding_scale
        self._embedding_scale = None if scale is None else torch.tensor(scale).to(self.dtype)
        self.layers = tuple(
            PagedLayer(
                index,
                LayerSpec(
                    num_query_heads=recipe.num_query_heads,
                    num_kv_heads=recipe.num_kv_heads,
                    key_dim=recipe.head_dim,
                    value_dim=recipe.head_dim,
                    window=layer.window,
                    softcap=recipe.softcap,
                ),
            )
            for index, layer in enumerate(recipe.layers)
        )
        self._blocks = [
            _Layer(weights, f"model.layers.{index}", recipe, self.layers[index], layer.rope)
            for index, layer in enumerate(recipe.layers)
        ]
        self._head = weights.head()
        self._embedding = weights.embedding(self._head)
        self.weight_bytes = weights.num_bytes
        self.quantization = "+".join(sorted(weights.kinds)) if any("int" in kind for kind in weights.kinds) else "none"
        self._ropes = [RopeTable(_Frequencies(rope), (), self.dtype, max_positions) for rope in recipe.ropes]
        self.decoder = self._native_decoder(recipe) if backend.name == "native" else None

    def _native_decoder(self, recipe: FusedRecipe) -> NativeDecoder:
        """Over the same tensors: all of a forward in one call, to the same bits."""
        behind_attention = "post_attention_layernorm" if recipe.is_sandwiched else ""
        middle = "pre_feedforward_layernorm" if recipe.is_sandwiched else "post_attention_layernorm"
        order = (
            "input_layernorm",
            behind_attention,
            middle,
            "post_feedforward_layernorm",
            "q_norm",
            "k_norm",
            "norm",
        )
        norms = [recipe.norms.get(name) for name in order]
        shape = DecoderShape(
            num_query_heads=recipe.num_query_heads,
            num_kv_heads=recipe.num_kv_heads,
            head_dim=recipe.head_dim,
            intermediate_size=self._blocks[0].intermediate_size,
            vocab_size=self._head.out_features,
            scale=recipe.scale,
            softcap=recipe.softcap,
            embedding_scale=None if self._embedding_scale is None else float(self._embedding_scale),
            activation=recipe.activation,
            norms=tuple(None if norm is None else (norm.eps, norm.variant) for norm in norms),
            windows=tuple(layer.window for layer in recipe.layers),
            ropes=tuple(layer.rope for layer in recipe.layers),
        )
        layers = [block.tensors() for block in self._blocks]
        return NativeDecoder(shape, self._embedding, self._final_norm.weight, self._head.packed, layers)

    def cover(self, num_positions: int) -> None:
        """Before a forward: rotary rows for positions [0, num_positions)."""
        for rope in self._ropes:
            rope.cover(num_positions)

    def compute(self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor) -> Tensor:
        """See Backbone.forward."""
        if self.decoder is not None:
            return self.decoder.forward(input_ids, positions, logits_indices, self.layers, self._ropes)
        return self.logits(self.hidden_states(input_ids, positions)[logits_indices])

    def logits(self, hidden_states: Tensor) -> Tensor:
        """See Backbone.logits."""
        return self._head(hidden_states)

    def hidden_states(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """See Backbone.hidden_states."""
        if self.decoder is not None:
            return self.decoder.forward(input_ids, positions, None, self.layers, self._ropes)
        residual = self._embed(input_ids)
        if self._embedding_scale is not None:
            residual *= self._embedding_scale
        rotations = []
        for rope in self._ropes:
            cos, sin = rope(residual, positions)
            rotations.append((cos.unsqueeze(1), sin.unsqueeze(1)))  # [num_tokens, 1, head_dim]
        x = self._blocks[0].input_norm(residual)
        next_norms = [block.input_norm for block in self._blocks[1:]] + [self._final_norm]
        for block, next_norm in zip(self._blocks, next_norms, strict=True):
            attended = block.attend(x, rotations[block.rope], self._backend)
            x = block.middle_norm.after_adding(attended, residual)
            x = next_norm.after_adding(block.feed_forward(x), residual)
        return x

    def _embed(self, input_ids: Tensor) -> Tensor:
        """[num_tokens, hidden_size]"""
        if self._embedding.dtype != torch.uint8:
            return functional.embedding(input_ids, self._embedding)
        return ops.embed_quant(input_ids, self._embedding, self._final_norm.weight, self.vocab_size)
