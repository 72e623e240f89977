"""Which device, the words when there is none, and the lane's promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.config import StartError
from engine.device import CPU, CudaFacts, HostLane, choose_device, decide, is_fatal, is_out_of_memory
from tests.engine.delayed_lane import POISON, DelayedLane

TWO = CudaFacts(
    "2.11.0+cu130", True, True, "", ("NVIDIA H200", "NVIDIA V100"), ((9, 0), (7, 0)), (150 << 30, 32 << 30)
)


def test_auto_takes_the_first_device_that_works() -> None:
    device = decide("auto", TWO)
    assert device.torch_device == torch.device("cuda", 0)
    assert device.name == "NVIDIA H200"
    assert (device.memory_total, device.capability, device.is_cuda) == (150 << 30, (9, 0), True)


@pytest.mark.parametrize(
    "facts",
    [
        CudaFacts("2.13.0+cpu", False),
        replace(TWO, has_library=False),
        replace(TWO, failure="no driver", names=()),
        replace(TWO, names=("NVIDIA V100",), capabilities=((7, 0),), memory_totals=(1,)),
    ],
)
def test_auto_falls_back_to_the_cpu(facts: CudaFacts) -> None:
    assert decide("auto", facts) is CPU


def test_auto_says_why_a_device_that_is_there_does_not_serve(caplog: pytest.LogCaptureFixture) -> None:
    decide("auto", replace(TWO, has_library=False))
    assert "_C_cuda" in caplog.text
    caplog.clear()
    decide("auto", CudaFacts("2.13.0+cpu", False))
    assert not caplog.text


def test_the_cpu_when_asked_for() -> None:
    assert decide("cpu", TWO) is CPU
    assert choose_device("cpu") is CPU


@pytest.mark.parametrize(
    ("name", "facts", "sentence"),
    [
        ("cuda", CudaFacts("2.13.0+cpu", False), "--device cuda needs a torch with CUDA, and torch 2.13.0+cpu here"),
        (
            "cuda",
            CudaFacts("2.11.0", True, True, "Found no driver on your system"),
            "no CUDA device that works: Found",
        ),
        ("cuda:2", TWO, "--device cuda:2 was asked for, but there are 2 CUDA devices here"),
        ("cuda:1", TWO, "NVIDIA V100 has compute capability 7.0; the kernels need 8.0 or more."),
        ("cuda", replace(TWO, has_library=False), "the kernels for it (_C_cuda) are not"),
        ("tpu", TWO, "--device must be auto, cpu, cuda or cuda:N, got 'tpu'."),
        ("cuda:x", TWO, "got 'cuda:x'"),
        ("CUDA", TWO, "got 'CUDA'"),
    ],
)
def test_a_device_that_cannot_serve_is_refused_in_one_sentence(name: str, facts: CudaFacts, sentence: str) -> None:
    with pytest.raises(StartError) as refused:
        decide(name, facts)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(torch.version.cuda is not None, reason="a torch without CUDA is needed")
def test_this_torch_has_no_cuda() -> None:
    assert choose_device("auto") is CPU
    with pytest.raises(StartError, match="needs a torch with CUDA"):
        choose_device("cuda")


def test_a_copy_to_the_host_is_there_after_the_wait() -> None:
    for lane in (HostLane(), DelayedLane()):
        staged = lane.staging(16).view(torch.int32)
        source = torch.arange(4, dtype=torch.int32)
        mark = lane.to_host(source, staged)
        source.fill_(9)  # work issued later does not change what is copied
        mark.wait()
        assert staged.tolist() == [0, 1, 2, 3]


def test_the_delayed_lane_poisons_what_is_read_too_early() -> None:
    lane = DelayedLane()
    staged = lane.staging(4)
    first = lane.to_host(torch.zeros(4, dtype=torch.uint8), staged)
    assert staged.tolist() == [POISON] * 4
    lane.synchronize()
    assert staged.tolist() == [0] * 4
    first.wait()
    assert staged.tolist() == [0] * 4


def test_the_delayed_lane_finds_staging_memory_that_is_used_again_too_early() -> None:
    lane = DelayedLane()
    staged, there = lane.staging(4), torch.empty(4, dtype=torch.uint8)
    staged.fill_(1)
    lane.to_device(staged, there)
    lane.mark().wait()
    staged.fill_(2)
    lane.to_device(staged, there)
    staged.fill_(3)
    with pytest.raises(AssertionError, match="before its copy was over"):
        lane.mark().wait()
    assert there.tolist() == [2] * 4


@pytest.mark.parametrize(
    ("error", "fatal", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False, True),
        (RuntimeError("CUDA error: out of memory"), False, True),
        (MemoryError(), False, True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700), True, False),
        (RuntimeError("pagemill.paged_attention: launch: CUDA error 700"), True, False),
        (RuntimeError("pagemill.linear: launch: CUDA error 9"), False, False),
        (RuntimeError("pagemill.linear: launch: CUDA error 2"), False, True),
        (RuntimeError('torch_call_dispatcher( "aten::new_empty", "") API call failed at ops.h'), False, True),
        (RuntimeError("aoti_torch_get_dim(ath_.get(), &dim) API call failed at tensor.h, line 9"), False, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), True, False),
        (RuntimeError("pagemill.linear: x: wanted 2 dimensions, got 3"), False, False),
        (ValueError("CUDA error"), False, False),
    ],
)
def test_which_errors_end_the_engine(error: BaseException, fatal: bool, memory: bool) -> None:
    assert is_fatal(error) is fatal
    assert is_out_of_memory(error) is memory
