"""The last shape of logits against torch in double precision, and the rule that none depends on where it stands."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine import ops


@pytest.mark.parametrize(("scale", "softcap"), [(0.125, 0.0), (1.0, 30.0), (0.3, 4.0)])
@pytest.mark.parametrize("shape", [(1, 97), (5, 131), (64, 1000), (0, 7)])
def test_against_torch(kernels: Any, shape: tuple[int, int], scale: float, softcap: float) -> None:
    logits = 20 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    wanted = logits.double() * scale
    if softcap:
        wanted = softcap * (wanted / softcap).tanh()
    kernels.shape_logits(logits, scale, softcap)
    torch.testing.assert_close(logits.double(), wanted, rtol=1e-6, atol=1e-6)


def test_a_logit_does_not_depend_on_its_place(kernels: Any) -> None:
    values = 20 * torch.randn(61, generator=torch.Generator().manual_seed(2))
    for start in range(40):
        moved = torch.zeros(2, 1000)
        moved[1, start : start + 61] = values
        kernels.shape_logits(moved, 0.3, 4.0)
        alone = values.clone().view(1, -1)
        kernels.shape_logits(alone, 0.3, 4.0)
        assert torch.equal(moved[1, start : start + 61], alone[0])


def test_bans_and_faults_stay_what_they_are(kernels: Any) -> None:
    logits = torch.tensor([[float("-inf"), float("nan"), 1.0]])
    kernels.shape_logits(logits, 0.5, 0.0)
    assert logits[0, 0] == float("-inf")
    assert logits[0, 1].isnan()


def test_what_cannot_be_is_refused() -> None:
    logits = torch.zeros(1, 3)
    with pytest.raises(RuntimeError, match="shape_logits: softcap"):
        ops.shape_logits(logits, 1.0, -1.0)
    with pytest.raises(RuntimeError, match="shape_logits: logits"):
        ops.shape_logits(logits.double(), 1.0, 0.0)
