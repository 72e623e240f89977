"""Which kernels an op test runs on.

`level`: the CPU's ops on each instruction-set level this machine has, worst to best. `kernels`: the same, then the
CUDA kernels, emulated under three seeds of their scheduler (the first in every run, the others where slow tests run)
and on a GPU (-m gpu). `launched`: the CUDA kernels only. `dtype` beside one of these is every type they have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine import ops
from tests.ops.kernels import EMULATED, LAUNCHED, LaunchedOps, kernels_of

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]
MARKS = {"cuda": ON_GPU, **{name: [pytest.mark.slow] for name in EMULATED[1:]}}
CPU_DTYPES = (torch.float32, torch.bfloat16)
DTYPES = (*CPU_DTYPES, torch.float16)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture, names in (("kernels", (*ops.isa_levels(), *LAUNCHED)), ("launched", LAUNCHED)):
        if fixture not in metafunc.fixturenames:
            continue
        if "dtype" not in metafunc.fixturenames:
            params = [pytest.param(name, marks=MARKS.get(name, ()), id=name) for name in names]
            metafunc.parametrize(fixture, params, indirect=True)
            continue
        pairs = [(n, d) for n in names for d in (DTYPES if n in LAUNCHED else CPU_DTYPES)]
        params = [pytest.param(n, d, marks=MARKS.get(n, ()), id=f"{n}-{str(d)[6:]}") for n, d in pairs]
        metafunc.parametrize((fixture, "dtype"), params, indirect=[fixture])
        return
    own = [argument for mark in metafunc.definition.iter_markers("parametrize") for argument in mark.args[:1]]
    if "dtype" in metafunc.fixturenames and not any("dtype" in names for names in own):
        metafunc.parametrize("dtype", CPU_DTYPES, ids=["f32", "bf16"])


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Iterator[Any]:
    with kernels_of(request.param) as found:
        yield found


@pytest.fixture
def launched(request: pytest.FixtureRequest) -> Iterator[LaunchedOps]:
    with kernels_of(request.param) as found:
        yield found


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
