"""The kernels that make batches, edit logits and draw, in the place where the device's runner calls them: step by step
the answers of ModelRunner, whose model and whose sampler are the CPU's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from engine import device_ops, ops
from tests.engine.delayed_lane import DelayedLane
from tests.engine.lockstep import Pair
from tests.engine.random_steps import pair, play
from tests.ops.device_kernels import LaunchedDeviceOps
from tests.ops.kernels import EMULATED, kernels_of

__all__ = ["pair"]  # a fixture

KERNELS = (
    "prepare_batch", "store_tokens", "load_counts", "count_tokens", "apply_penalties", "add_bias",
    "apply_token_bitmask",
)  # fmt: skip


@pytest.fixture(params=[pytest.param(n, marks=[pytest.mark.slow] if n != EMULATED[0] else []) for n in EMULATED])
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    draw = ops.sample
    with kernels_of(request.param) as launched:

        def sample(*given: Tensor, source: Tensor | None = None, **edits: Any) -> Tensor:
            if any(edit is not None for edit in edits.values()):  # ModelRunner's
                return draw(*given, source=source, **edits)
            return launched.sample(*given, source=source)

        monkeypatch.setattr(ops, "sample", sample)
        kernels = LaunchedDeviceOps(launched)
        for name in KERNELS:
            monkeypatch.setattr(device_ops, name, getattr(kernels, name))
        yield


@pytest.mark.parametrize("seed", range(4))
def test_every_step_is_that_of_the_model_runner(pair: Pair, emulated: None, seed: int) -> None:
    play(pair, seed, depth=2, lane=DelayedLane(), recorded=True, num_turns=15)
