"""What a fused decoder is put together from: packed products, norms, rotations, and where their tensors come from."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine import ops
from engine.config import StartError
from engine.models.deltas import PANEL, Deltas, LowRank, Spans, panel_order
from engine.models.fused_recipe import EMBEDDING, FINAL_NORM, HEAD, HEAD_BIAS, FusedRecipe, NormRecipe, RopeRecipe
from engine.models.quantised import QuantisedWeight, join
from engine.models.quantiser import Quantiser
from engine.models.tensor_names import NamedTensors
from engine.ops import ActivationKind


class Frequencies(nn.Module):
    """Fills a RopeTable. sin carries the sign of the rotation: the first half is negated."""

    def __init__(self, rope: RopeRecipe) -> None:
        super().__init__()
        self._inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32)
        self._scaling = rope.scaling

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self._inv_freq
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        return torch.cat([cos, cos], -1).to(x.dtype), torch.cat([-sin, sin], -1).to(x.dtype)


def rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """heads: [num_tokens, num_heads, head_dim], of which the first rotary_dim elements are rotated. Two products and a
    sum, rounded one by one as transformers does."""
    cos, sin = rotation
    width = cos.shape[-1]
    turned = heads[..., :width]
    rotated = (turned * cos).add_(turned.roll(width // 2, -1).mul_(sin))
    return rotated if width == heads.shape[-1] else torch.cat([rotated, heads[..., width:]], -1)


def order_of_halves(num_heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """Where elements of heads that are rotated with their neighbours come from, so that they can be rotated by halves:
    [num_heads * head_dim]. Queries and keys in the same other order give the same scores."""
    head = torch.cat(
        [torch.arange(0, rotary_dim, 2), torch.arange(1, rotary_dim, 2), torch.arange(rotary_dim, head_dim)]
    )
    return (torch.arange(num_heads).unsqueeze(1) * head_dim + head).flatten()


def order_of_parts(num_heads: int, head_dim: int) -> Tensor:
    """Where the rows of all queries, then keys, then values come from, if each head's three lie together:
    [3 * num_heads * head_dim]."""
    rows = torch.arange(3 * num_heads * head_dim).view(num_heads, 3, head_dim)
    return rows.transpose(0, 1).flatten()


class Norm:
    def __init__(self, weight: Tensor, recipe: NormRecipe) -> None:
        self.weight, self.eps, self.variant = weight, recipe.eps, recipe.variant

    def __call__(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, self.variant)

    def after_adding(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual += x, then the norm of the sum."""
        return ops.fused_add_rms_norm(x, residual, self.weight, self.eps, self.variant)


class Linear:
    """PackedLinear without a module's overhead: x [num_tokens, in_features].

    gate: weight's rows are a gate's and then another half's; the result is activation(gate) * half. deltas: what
    adapters add."""

    deltas: Deltas | None = None

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

    def __call__(self, x: Tensor, spans: Spans = ()) -> Tensor:
        if spans and self.deltas is not None and self.deltas.change(spans):
            return self._adapted(x, self.deltas, spans)
        multiply = ops.linear_quant if self.is_quantised else ops.linear
        return multiply(x, self.packed, self.bias, self.out_features, out_dtype=self._out_dtype, activation=self._gate)

    def adapt(self, adapter: int, low_rank: LowRank) -> None:
        """low_rank: of all rows of the weight, in its dtype or the one it was quantised from."""
        if self.deltas is None:
            self.deltas = Deltas()
            self._all_rows, self._all_bias = self.out_features, self.bias
            if self._gate is not None:
                self._order = panel_order(self.out_features)
                self._all_rows = len(self._order)
                self._all_bias = None if self.bias is None else functional.pad(self.bias, (0, 1))[self._order]
        self.deltas.put(adapter, low_rank if self._gate is None else low_rank.with_rows(self._order))

    def _adapted(self, x: Tensor, deltas: Deltas, spans: Spans) -> Tensor:
        """The gate waits for the sum: a gated weight multiplied without its gate gives the halves panel by panel. Rows
        without an adapter keep the bits that they have without all this."""
        multiply = ops.linear_quant if self.is_quantised else ops.linear
        y = multiply(x, self.packed, self._all_bias, self._all_rows, out_dtype=torch.float32)
        y = deltas.added(x, y, spans).to(self._out_dtype or x.dtype)
        if self._gate is None:
            return y
        halves = ops.ACTIVATE_AND_MULTIPLY[self._gate](y.view(-1, PANEL)).view(len(x), -1)
        return halves[:, : self.out_features]

    @property
    def num_bytes(self) -> int:
        return self.packed.nbytes + (0 if self.bias is None else self.bias.nbytes)


class Weights:
    """Checkpoint tensors by name, as the parts of a layer; each goes to the device when it is asked for.

    num_bytes: of what was made so far. dtype: of whatever is not told another. kinds: the forms of its linear layers'
    weights."""

    def __init__(
        self, tensors: NamedTensors, recipe: FusedRecipe, quantiser: Quantiser | None, device: torch.device
    ) -> None:
        self._tensors, self._recipe, self._quantiser, self._device = tensors, recipe, quantiser, device
        self.num_bytes = 0
        self.kinds: set[str] = set()
        self.dtype = self.tensor(FINAL_NORM).dtype

    def module(self, name: str) -> str:
        """What a linear layer is called in the model itself."""
        return self._tensors.module(name)

    @property
    def is_on_cpu(self) -> bool:
        """Where there are products of float32 whatever the model's dtype is."""
        return self._device.type == "cpu"

    def tensor(self, name: str) -> Tensor:
        try:
            tensor = self._tensors[name].detach().to(self._device)
        except KeyError as error:
            raise StartError(f"The weights lack the tensor {name}.") from error
        is_part = self._device.type == "cuda" and tensor.untyped_storage().nbytes() > tensor.nbytes
        return tensor.clone() if is_part else tensor  # else one expert would keep all of them

    def linear(
        self,
        *names: str,
        gate: ActivationKind | None = None,
        exact: torch.dtype | None = None,
        order: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Linear:
        """One packed product of several layers' rows. exact: never quantised, but in this dtype. order: of all rows,
        [num_rows]. out_dtype: of the result; None: that of x."""
        has_bias = f"{names[0]}.bias" in self._tensors
        bias = torch.cat([self.tensor(f"{name}.bias") for name in names]) if has_bias else None
        matrix = self._matrix(*(f"{name}.weight" for name in names), exact=exact)
        if order is not None:
            matrix = (
                matrix.with_rows(lambda rows: rows[order]) if isinstance(matrix, QuantisedWeight) else matrix[order]
            )
            bias = None if bias is None else bias[order]
        return self._packed(Linear(matrix, bias, gate=gate, out_dtype=out_dtype))

    def head(self) -> Linear:
        """Of float32 logits."""
        name = EMBEDDING if self._recipe.is_tied else HEAD
        bias = self.tensor(HEAD_BIAS) if HEAD_BIAS in self._tensors else None
        return self._packed(Linear(self._matrix(name, is_head=True), bias, out_dtype=torch.float32))

    def embedding(self, head: Linear) -> Tensor:
        """The table [vocab_size, hidden_size], or the packed weight of which ops.embed_quant reads rows: the head's
        own if they are one tensor. On CUDA a packed weight is the matrix itself."""
        if self._recipe.is_tied:
            return head.packed if head.is_quantised or self._device.type == "cuda" else self.copy(EMBEDDING)
        quantised = None if self._quantiser is None else self._quantiser.weight(EMBEDDING, is_head=True)
        if quantised is None:
            return self.copy(EMBEDDING)
        packed = quantised.pack()
        self.num_bytes += packed.nbytes
        return packed

    def _packed(self, linear: Linear) -> Linear:
        self.num_bytes += linear.num_bytes
        return linear

    def _matrix(
        self, *names: str, is_head: bool = False, exact: torch.dtype | None = None
    ) -> Tensor | QuantisedWeight:
        """The rows of several matrices: quantised if all are to be."""
        quantiser = None if exact is not None else self._quantiser
        quantised = [] if quantiser is None else [quantiser.weight(n, is_head=is_head) for n in names]
        known = [weight for weight in quantised if weight is not None]
        if len(known) == len(names):
            joined = join(known)
            self.kinds.add(f"int{joined.bits}")
            return joined
        parts = [self.tensor(name) for name in names]
        if exact is not None:
            parts = [part.to(exact) for part in parts]
        self.kinds.add(str(parts[0].dtype).removeprefix("torch."))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def float32(self, name: str) -> Tensor:
        """Few numbers, [count], in full."""
        tensor = self.tensor(name).float().flatten().clone()
        self.num_bytes += tensor.nbytes
        return tensor

    def copy(self, name: str) -> Tensor:
        """Of a tensor: a view would keep the whole file mapped after all else is packed."""
        tensor = self.tensor(name)
        copied = tensor.clone() if self._device.type == "cpu" else tensor
        self.num_bytes += copied.nbytes
        return copied

    def head_norm(self, path: str, head_dim: int, rotary_dim: int) -> Norm:
        """rotary_dim: of heads rotated with their neighbours; 0: there are none."""
        num_heads = self.tensor(f"{path}.weight").numel() // head_dim
        return self.norm(path, order_of_halves(num_heads, head_dim, rotary_dim) if rotary_dim else None)

    def norm(self, path: str, order: Tensor | None = None) -> Norm:
        """order: of a norm's elements."""
        recipe = self._recipe.norms[path.rpartition(".")[2]]
        weight = self.tensor(f"{path}.weight")
        if recipe.variant == "layer":
            bias = f"{path}.bias"
            weight = torch.stack([weight, self.tensor(bias) if bias in self._tensors else torch.zeros_like(weight)])
        weight = weight.clone() if order is None else weight[..., order].contiguous()
        self.num_bytes += weight.nbytes
        return Norm(weight, recipe)

    def norm_in(self, path: str, name: str | None, *, is_wide: bool = False) -> Norm | None:
        """The norm `name` of the module `path`; None without a name. is_wide: from float32 to float32."""
        if name is None:
            return None
        norm = self.norm(f"{path}.{name}")
        if is_wide:
            self.num_bytes -= norm.weight.nbytes
            norm.weight = norm.weight.float()
            self.num_bytes += norm.weight.nbytes
        return norm
