"""What checkpoints and trees call the tensors that a recipe knows by one name.

A recipe's names are those of Llama, and for experts those of Qwen's and DeepSeek's checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

CHOOSING = "e_score_correction_bias"  # the last part of what decides between experts and weighs none
CHOOSERS = (CHOOSING, ".gate.weight", ".router.weight")  # of what decides at all
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class Dialect(NamedTuple):
    """pairs: (part of one of our names, what stands in its place), replaced one after the other. by_head: see
    FusedRecipe.qkv_by_head."""

    pairs: tuple[tuple[str, str], ...] = ()
    by_head: bool = False

    def theirs(self, name: str) -> str:
        for own, other in self.pairs:
            name = name.replace(own, other)
        return name

    def ours(self, name: str) -> str:
        for own, other in reversed(self.pairs):
            name = name.replace(other, own)
        return name

    def module(self, name: str) -> str:
        """`theirs` of a module, whose name has nothing behind it."""
        return self.theirs(f"{name}.").removesuffix(".")


_CORRECTION = f".mlp.gate.{CHOOSING}"
PLAIN_DIALECT = Dialect()
MIXTRAL = Dialect(  # and MiniMax-M2, in files
    (
        (_CORRECTION, f".block_sparse_moe.{CHOOSING}"),
        (".mlp.", ".block_sparse_moe."),
        (".gate_proj.", ".w1."),
        (".up_proj.", ".w3."),
        (".down_proj.", ".w2."),
    )
)
_NEOX = (
    ("model.layers.", "gpt_neox.layers."),
    ("model.embed_tokens.", "gpt_neox.embed_in."),
    ("model.norm.", "gpt_neox.final_layer_norm."),
    (".self_attn.qkv_proj.", ".attention.query_key_value."),
    (".self_attn.o_proj.", ".attention.dense."),
    (".mlp.up_proj.", ".mlp.dense_h_to_4h."),
    (".mlp.down_proj.", ".mlp.dense_4h_to_h."),
)
DIALECTS = (
    PLAIN_DIALECT,
    Dialect(((".mlp.shared_experts.", ".mlp.shared_expert."),)),  # Qwen2-MoE
    Dialect(((_CORRECTION, f".mlp.{CHOOSING}"),)),  # MiniMax-M2 in a tree, EXAONE-MoE in files
    Dialect(((_CORRECTION, f".mlp.gate.moe_statics.{CHOOSING}"),)),  # Ernie 4.5 in a tree
    Dialect(((_CORRECTION, f".mlp.moe_statics.{CHOOSING}"),)),  # in files
    MIXTRAL,
    Dialect(  # Phi-2
        (
            ("model.norm.", "model.final_layernorm."),
            (".self_attn.o_proj.", ".self_attn.dense."),
            (".self_attn.q_norm.", ".self_attn.q_layernorm."),
            (".self_attn.k_norm.", ".self_attn.k_layernorm."),
            (".mlp.up_proj.", ".mlp.fc1."),
            (".mlp.down_proj.", ".mlp.fc2."),
        )
    ),
    Dialect(_NEOX, by_head=True),  # in a tree
    Dialect((*_NEOX, ("lm_head.", "embed_out.")), by_head=True),  # in files
    Dialect(  # GraniteMoE in a tree
        (
            (".mlp.gate.", ".block_sparse_moe.router."),
            (".mlp.experts.", ".block_sparse_moe.experts."),
            (".mlp.shared_experts.gate_up_proj.", ".shared_mlp.input_linear."),
            (".mlp.shared_experts.down_proj.", ".shared_mlp.output_linear."),
        )
    ),
)


def stored_name(name: str, names: Container[str]) -> str | None:
    """The one of `names` that is ours of this name in some dialect."""
    return next((stored for dialect in DIALECTS if (stored := dialect.theirs(name)) in names), None)


class NamedTensors(Mapping[str, Tensor]):
    """A checkpoint's or a tree's tensors under the names of FusedRecipe.tensor_names, every expert's matrices apart,
    whether they are stored so or in one tensor for all experts."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        stored = stored_name(name, self._tensors)
        if stored is not None:
            return self._tensors[stored]
        found = _EXPERT.fullmatch(name)
        if found is None:
            raise KeyError(name)
        path, expert, part = found[1], int(found[2]), found[3]
        if part == "down":
            return self._of_all(f"{path}.down_proj")[expert]
        gate, up = self._of_all(f"{path}.gate_up_proj")[expert].chunk(2)
        return gate if part == "gate" else up

    def module(self, name: str) -> str:
        """What a module with a weight is called where its weight lies; as we call it if there is none."""
        stored = stored_name(f"{name}.weight", self._tensors)
        return name if stored is None else stored.removesuffix(".weight")

    def _of_all(self, name: str) -> Tensor:
        """One tensor for all experts."""
        stored = stored_name(name, self._tensors)
        if stored is None:
            raise KeyError(name)
        return self._tensors[stored]

    def __contains__(self, name: object) -> bool:
        """True for what lies there by itself."""
        return isinstance(name, str) and stored_name(name, self._tensors) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
