"""The swap pass: the same function afterwards, everything recognised that should be, nothing that should not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.models.recognise import activation_kind, norm_variant
from engine.models.rope_table import PIECE, make_table
from engine.models.swap import swap_modules
from engine.models.swap_modules import GatedMLP, PackedLinear
from tests.engine.tiny_configs import CONFIGS, plain_logits, plain_tree, relative, tokens

# family -> (gated MLPs, RMS norms, rotary tables); every linear layer is swapped in all of them
EXPECTED = {
    "llama": (3, 7, 1),
    "llama_1000": (3, 7, 1),
    "llama_tied": (3, 7, 1),
    "qwen2": (3, 7, 1),
    "qwen3": (3, 13, 1),
    "gemma2": (3, 13, 1),
    "gemma3": (3, 19, 1),
    "mistral": (3, 7, 1),
    "phi3": (3, 7, 1),
    "olmo2": (3, 13, 1),
    "granite": (3, 7, 1),
    "mixtral": (0, 7, 1),
    "gpt_neox": (0, 7, 1),
    "gpt2": (0, 7, 0),
}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_swapped_tree_computes_the_same(name: str) -> None:
    """Under transformers' own attention, so that only the swap differs."""
    tree = plain_tree(name)
    ids = tokens(33)
    expected = plain_logits(tree, ids)
    report = swap_modules(tree, torch.float32, 1024)
    assert not any(type(module) is nn.Linear for module in tree.modules())
    if name in EXPECTED:
        assert (report.mlps, report.norms, report.rope_tables) == EXPECTED[name]
    assert relative(plain_logits(tree, ids), expected) < 1e-5


@pytest.mark.parametrize("name", ["llama", "gemma3", "olmo2"])
def test_bfloat16_stays_within_its_rounding(name: str) -> None:
    tree = plain_tree(name, torch.bfloat16)
    ids = tokens(33)
    expected = plain_logits(tree, ids)
    swap_modules(tree, torch.bfloat16, 1024)
    difference = plain_logits(tree, ids) - expected
    assert float(difference.pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()) < 0.05


def test_a_tied_head_leaves_the_embedding_in_place() -> None:
    tree = plain_tree("llama_tied")
    table = tree.get_input_embeddings().weight.clone()
    swap_modules(tree, torch.float32, 1024)
    assert torch.equal(tree.get_input_embeddings().weight, table)
    assert isinstance(tree.get_output_embeddings(), PackedLinear)


def test_the_head_answers_in_float32() -> None:
    tree = plain_tree("llama", torch.bfloat16)
    swap_modules(tree, torch.bfloat16, 1024)
    assert tree.get_output_embeddings()(torch.ones(1, 1, 60, dtype=torch.bfloat16)).dtype == torch.float32


class _Norm(nn.Module):
    def __init__(self, kind: str, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, dtype=dtype))
        self.eps = 1e-6
        self._kind = kind

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self._kind == "llama":
            return self.weight * normed.to(x.dtype)
        if self._kind == "gemma":
            return (normed * (1 + self.weight.float())).to(x.dtype)
        if self._kind == "f32":
            return (normed * self.weight.float()).to(x.dtype)
        return (self.weight * (x - x.mean(-1, keepdim=True))).to(x.dtype)


@pytest.mark.parametrize("kind", ["llama", "gemma", "f32"])
def test_norms_are_told_apart_by_their_rounding(kind: str) -> None:
    assert norm_variant(_Norm(kind, 100, torch.bfloat16), 1e-6) == kind
    if kind == "gemma":
        assert norm_variant(_Norm(kind, 100, torch.float32), 1e-6) == kind


def test_another_norm_is_left_alone() -> None:
    assert norm_variant(_Norm("centred", 100, torch.float32), 1e-6) is None


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (nn.SiLU(), "silu"),
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (nn.ReLU(), None),
        (nn.Identity(), None),
        (nn.Bilinear(2, 2, 2), None),
    ],
)
def test_activations_are_recognised_by_value(module: nn.Module, kind: str | None) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert activation_kind(module, dtype) == kind


class _Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.mlp, self.out = inner, nn.Linear(24, 5)

    def get_output_embeddings(self) -> nn.Module:
        return self.out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(x)
        return y


class _Gated(nn.Module):
    def __init__(self, *, gate_first: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(24, 40), nn.Linear(24, 40), nn.Linear(40, 24)
        self._gate_first = gate_first

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        gate, up = (a, b) if self._gate_first else (b, a)
        y: Tensor = self.c(functional.gelu(gate, approximate="tanh") * up)
        return y


class _NotGated(_Gated):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(self.a(x) + self.b(x))
        return y


@pytest.mark.parametrize("gate_first", [True, False])
@torch.inference_mode()
def test_gate_and_up_are_found_by_arithmetic(gate_first: bool) -> None:
    holder = _Holder(_Gated(gate_first=gate_first))
    x = torch.randn(7, 24)
    expected = holder(x)
    swap_modules(holder, torch.float32, 64)
    assert isinstance(holder.mlp, GatedMLP)
    assert holder.mlp.kind == "gelu_tanh"
    torch.testing.assert_close(holder(x), expected, rtol=1e-5, atol=1e-6)


@torch.inference_mode()
def test_what_only_looks_like_a_gated_mlp_is_left_alone() -> None:
    holder = _Holder(_NotGated(gate_first=True))
    x = torch.randn(7, 24)
    expected = holder(x)
    swap_modules(holder, torch.float32, 64)
    assert isinstance(holder.mlp, _NotGated)
    torch.testing.assert_close(holder(x), expected, rtol=1e-5, atol=1e-6)


def test_rotary_table_grows_and_keeps_its_rows() -> None:
    source = plain_tree("llama").model.rotary_emb
    table = make_table(source, torch.float32, 5000)
    assert table is not None
    x, positions = torch.empty(1, 1, 1), torch.tensor([[0, 5, 2047]])
    before = [part.clone() for part in table(x, positions)]
    table.cover(4000)
    for old, new in zip(before, table(x, positions), strict=True):
        assert torch.equal(old, new)
    far = torch.tensor([[3999]])
    for ours, theirs in zip(table(x, far), source(x, far), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_position_has_the_same_bits_wherever_it_stands() -> None:
    source = plain_tree("gemma3").model.rotary_emb
    table = make_table(source, torch.float32, 1024)
    assert table is not None
    x = torch.empty(1, 1, 1)
    for layer_type in ("full_attention", "sliding_attention"):
        alone = table(x, torch.tensor([[777]]), layer_type)
        together = table(x, torch.arange(770, 780).unsqueeze(0), layer_type)
        for one, many in zip(alone, together, strict=True):
            assert torch.equal(one[0, 0], many[0, 7])
    assert PIECE * 256 * 2 <= 32_768  # elements of the widest piece torch still computes on one thread


def test_what_is_no_rotary_module_gets_no_table() -> None:
    assert make_table(nn.LayerNorm(8), torch.float32, 64) is None
    assert make_table(plain_tree("llama4").model.rotary_emb, torch.float32, 64) is None
