"""What a tree's layers are made of, by the names of its parameters."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product
from typing import NamedTuple

from engine.models.fused_recipe import (
    CORRECTION,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    HEAD_BIAS,
    JOINED_EXPERTS,
    JOINED_QKV,
    MLPS,
    OUTPUT,
    PLACES,
    QK_NORMS,
    ROUTER,
    SHARED_GATE,
    SHARED_MLPS,
    SPLIT_QKV,
    MlpNames,
)
from engine.models.tensor_names import DIALECTS, Dialect

_LAYERS = "model.layers."


class Mixture(NamedTuple):
    """What may stand beside routed experts."""

    shared: MlpNames | None
    has_shared_gate: bool
    has_correction: bool

    @property
    def tensors(self) -> frozenset[str]:
        shared = () if self.shared is None else (*self.shared.first, self.shared.down)
        modules = (ROUTER, *shared, *((SHARED_GATE,) if self.has_shared_gate else ()))
        correction = (CORRECTION,) if self.has_correction else ()
        return frozenset((*(f"{module}.weight" for module in modules), *JOINED_EXPERTS, *correction))


_MIXTURES = tuple(
    Mixture(shared, has_gate, has_correction)
    for shared, has_gate, has_correction in product((None, *SHARED_MLPS), (False, True), (False, True))
    if shared is not None or not has_gate
)


class Parts(NamedTuple):
    """What layers have, in our names; dialect: what the tree has in their place. mlp: of dense layers, None if there
    are none; mixture: of all others. is_dense: by layer."""

    norms: tuple[str, ...]
    qkv: tuple[str, ...]
    mlp: MlpNames | None
    mixture: Mixture | None
    is_dense: tuple[bool, ...]
    dialect: Dialect

    @property
    def linears(self) -> tuple[tuple[str, ...], ...]:
        """Those that may have a bias; together if they become one product."""
        of_mlp = (self.mlp.first, (self.mlp.down,)) if self.mlp is not None and self.mixture is None else ()
        return (self.qkv, (OUTPUT,), *of_mlp)


def layer_parts(names: Collection[str], num_layers: int, is_tied: bool) -> Parts | None:
    """What the layers are made of, if the tree has exactly the parameters of a recipe; biases are optional."""
    for dialect in DIALECTS:
        own = {dialect.ours(name) for name in names}
        layers: list[set[str]] = [set() for _ in range(num_layers)]
        ends = set()
        for name in own:
            index, _, rest = name.removeprefix(_LAYERS).partition(".")
            if name.startswith(_LAYERS) and index.isdecimal() and int(index) < num_layers:
                layers[int(index)].add(rest)
            else:
                ends.add(name)
        weights = [frozenset(name for name in layer if not name.endswith(".bias")) for layer in layers]
        parts = _matching(weights, dialect)
        known_ends = {EMBEDDING, FINAL_NORM} | (set() if is_tied else {HEAD})
        extra = ends - known_ends
        if parts is not None and ends >= known_ends and extra <= {FINAL_NORM.replace("weight", "bias"), HEAD_BIAS}:
            biases = [layer - set(kept) for layer, kept in zip(layers, weights, strict=True)]
            return parts if _biases_fit(biases, parts) else None
    return None


def _matching(layers: list[frozenset[str]], dialect: Dialect) -> Parts | None:
    """layers: the weights of each."""
    kinds = set(layers)
    for places, norms, qkv in product(PLACES, ((), QK_NORMS), (SPLIT_QKV, JOINED_QKV)):
        attention = frozenset(f"{module}.weight" for module in (*places.names(), *norms, *qkv, OUTPUT))
        if not all(attention <= kind for kind in kinds):
            continue
        rests = {kind - attention for kind in kinds}
        mlp = next((mlp for mlp in MLPS if _weights(mlp) in rests), None)
        mixture = next((mixture for mixture in _MIXTURES if mixture.tensors in rests), None)
        if (mlp is not None) + (mixture is not None) == len(rests):
            is_dense = tuple(mixture is not None and f"{ROUTER}.weight" not in layer for layer in layers)
            return Parts((*places.names(), *norms), qkv, mlp, mixture, is_dense, dialect)
    return None


def _weights(mlp: MlpNames) -> frozenset[str]:
    return frozenset(f"{module}.weight" for module in (*mlp.first, mlp.down))


def _biases_fit(layers: list[set[str]], parts: Parts) -> bool:
    """Linear layers and norms only, the same in every layer, and all or none of those that become one product."""
    groups = [{f"{module}.bias" for module in group} for group in parts.linears]
    known = {f"{module}.bias" for module in parts.norms}.union(*groups)
    same = all(layer == layers[0] for layer in layers)
    return same and layers[0] <= known and all(layers[0] & group in (set(), group) for group in groups)
