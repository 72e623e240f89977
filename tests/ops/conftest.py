"""Every op test that asks for `level` runs on each instruction-set level this machine has, worst to best."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine import ops


@pytest.fixture(params=ops.isa_levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    ops.set_isa(request.param)
    yield request.param
    ops.set_isa("auto")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests run on one thread unless they ask: on a busy machine a second one mostly waits at barriers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2], ids=["1thread", "2threads"])
def threads(request: pytest.FixtureRequest, one_thread: None) -> int:
    torch.set_num_threads(request.param)
    return int(request.param)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
