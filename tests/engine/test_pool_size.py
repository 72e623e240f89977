"""The size of a device's KV pool, from what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import CacheConfig, StartError
from engine.kv.pool_size import MAX_BLOCKS, DeviceMemory, num_device_blocks

GIB = 1 << 30
H200 = DeviceMemory(total=140 * GIB, free=120 * GIB, reserved=16 * GIB, peak_reserved=22 * GIB)
PER_TOKEN = 128 << 10  # of an 8B model


def test_what_the_share_leaves_beside_weights_steps_and_others() -> None:
    assert H200.of_others == 4 * GIB
    assert H200.room(0.9) == 126 * GIB - 4 * GIB - 22 * GIB
    assert replace(H200, beside_steps=3 * GIB).room(0.9) == 97 * GIB
    config = CacheConfig(block_size=16)
    assert num_device_blocks(config, H200, PER_TOKEN, 1 << 20) == 100 * GIB // (16 * PER_TOKEN)


def test_a_share_that_others_have_already_taken_leaves_nothing() -> None:
    shared = replace(H200, free=1 * GIB)
    assert shared.of_others == 123 * GIB
    assert shared.room(0.9) == 0
    with pytest.raises(StartError) as refused:
        num_device_blocks(CacheConfig(), shared, PER_TOKEN, 1 << 20)
    assert str(refused.value) == (
        "Too little memory for the KV cache: --gpu-memory-utilization 0.9 leaves 0 bytes, two blocks need 4.0 MiB; of "
        "the device's 140.0 GiB weights and the largest step take 22.0 GiB and others 123.0 GiB."
    )


def test_a_size_that_is_given_rules_if_it_is_there() -> None:
    config = CacheConfig(memory_bytes=10 * GIB, gpu_memory_utilization=0.2)
    assert num_device_blocks(config, H200, PER_TOKEN, 1) == 10 * GIB // (16 * PER_TOKEN)
    with pytest.raises(StartError) as refused:
        num_device_blocks(replace(config, memory_bytes=115 * GIB), H200, PER_TOKEN, 1)
    assert str(refused.value) == (
        "--kv-cache-memory asks for 115.0 GiB, but of the device's 140.0 GiB weights and the largest step take 22.0 "
        "GiB and others 4.0 GiB: 114.0 GiB are left."
    )
    with pytest.raises(StartError, match=r"--kv-cache-memory is 1\.0 MiB, two blocks need 4\.0 MiB"):
        num_device_blocks(replace(config, memory_bytes=1 << 20), H200, PER_TOKEN, 1)


def test_a_small_model_gets_no_millions_of_blocks_unless_they_can_be_in_use() -> None:
    config = CacheConfig()
    assert num_device_blocks(config, H200, 1024, wanted_tokens=1 << 16) == MAX_BLOCKS
    assert num_device_blocks(config, H200, 1024, wanted_tokens=32 * MAX_BLOCKS + 5) == 2 * MAX_BLOCKS + 1


@given(
    total=st.integers(1, 1 << 40),
    free=st.floats(0, 1),
    reserved=st.floats(0, 1),
    peak=st.integers(0, 1 << 40),
    share=st.floats(0.01, 1),
    beside=st.integers(0, 1 << 38),
)
def test_the_pool_never_goes_past_the_share(
    total: int, free: float, reserved: float, peak: int, share: float, beside: int
) -> None:
    unused = int(total * free)
    ours = int((total - unused) * reserved)
    memory = DeviceMemory(total, unused, ours, max(peak, ours), beside)
    room = memory.room(share)
    assert room >= 0
    assert room == 0 or room + memory.peak_reserved + memory.beside_steps + memory.of_others <= total * share
