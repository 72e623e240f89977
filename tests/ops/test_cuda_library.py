"""`_C_cuda` as torch ops: loads without a driver and into a torch without CUDA, and serves what it says it serves."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine import ops
from engine.ops_library import library_candidates
from tests.emulation.build import ROOT

SERVED = [
    "activation", "add_bias", "advance_batch", "apply_penalties", "apply_token_bitmask", "copy_blocks", "count_tokens",
    "fused_add_rms_norm", "gated_activation", "gather_blocks", "linear", "load_counts", "logprobs_of", "logprobs_topn",
    "pack_linear", "paged_attention", "paged_attention_into", "prepare_batch", "qk_norm", "reshape_and_cache",
    "reshape_and_cache_scaled", "rms_norm", "rope_and_cache", "rotary", "sample", "sample_edited", "scatter_blocks",
    "shape_logits", "store_tokens",
]  # fmt: skip

SCRIPT = """
import sys
import torch
from engine import ops
torch.ops.load_library(sys.argv[1])
for name in sys.argv[2:]:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"pagemill::{name}", "CUDA"), name
x = torch.ones(2, 64)
assert ops.rms_norm(x, x[0], 1e-6, "llama").shape == x.shape  # the CPU's op is still the CPU's
print(torch.ops.pagemill.paged_attention_workspace(8, 1, 4096, 32, 8, 128))
"""


def test_registers_its_ops_wherever_it_is_loaded() -> None:
    found = library_candidates("_C_cuda.so")
    if not found:
        pytest.skip("_C_cuda is not built here: it needs nvcc")
    newest = max(found, key=lambda path: path.stat().st_mtime_ns)
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(newest), *SERVED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = 8 * 4 * (4096 // 256 + 1)  # sequences, heads of a group, splits
    assert 0 <= int(done.stdout) - rows * 8 * (128 * 4 + 8) <= 4096


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_blocks_go_to_pinned_memory_and_back() -> None:
    caches = [torch.randn(8, 2 + layer, 16, device="cuda") for layer in range(3)]
    before = [cache.clone() for cache in caches]
    size = sum(cache[0].nbytes for cache in caches)
    ids, pageable = torch.tensor([6, 1], device="cuda"), torch.zeros(2, size, dtype=torch.uint8)
    staging = pageable.pin_memory()
    ops.gather_blocks(caches, ids, staging)
    torch.cuda.synchronize()
    expected = [torch.cat([old[block].flatten().view(torch.uint8) for old in before]) for block in (6, 1)]
    assert torch.equal(staging, torch.stack(expected).cpu())
    ops.scatter_blocks(caches, torch.tensor([0, 7], device="cuda"), staging)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache, old[[6, 1, 2, 3, 4, 5, 6, 1]])
    with pytest.raises(RuntimeError, match="pinned"):
        ops.gather_blocks(caches, ids, pageable)


def test_sources_use_no_macro_of_torch_that_2_11_lacks() -> None:
    """They are built where the library is installed, with the headers of the torch that is there."""
    there = {"STABLE_TORCH_LIBRARY", "STABLE_TORCH_LIBRARY_IMPL", "TORCH_BOX"}
    sources = [path for pattern in ("*.cpp", "*.h", "cpu/*", "cuda/*") for path in (ROOT / "csrc").glob(pattern)]
    used = {name for path in sources for name in re.findall(r"\b(?:STABLE_)?TORCH_[A-Z_]+\b", path.read_text())}
    assert there & used
    assert used <= there


PROBE = """
#include "cuda_check.h"
extern "C" int probe() { return pagemill::find_current_stream() != nullptr; }
"""
TORCH_CUDA = 'extern "C" int aoti_torch_get_current_cuda_stream(int, void**) { return 0; }'
SEARCH = """
import ctypes
import sys
import torch
found = ctypes.CDLL(sys.argv[1]).probe
assert bool(found()) == (torch.version.cuda is not None)
ctypes.CDLL(sys.argv[2])
assert found()
"""


def test_finds_torchs_stream_in_a_library_that_it_is_not_linked_to(tmp_path: Path) -> None:
    """Python loads libtorch_cuda as it loads any module: its names are seen by those that link to it alone."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ here")
    folder = Path(torch.__file__).parent
    probe, torch_cuda = tmp_path / "probe.so", tmp_path / "libtorch_cuda.so"
    (tmp_path / "probe.cpp").write_text(PROBE)
    (tmp_path / "torch_cuda.cpp").write_text(TORCH_CUDA)
    shared = [compiler, "-shared", "-fPIC", "-std=c++17", "-w", "-o"]
    headers = ["-DTORCH_TARGET_VERSION=0x020b000000000000", f"-I{ROOT / 'csrc'}", f"-I{folder / 'include'}"]
    subprocess.run([*shared, torch_cuda, tmp_path / "torch_cuda.cpp", f"-Wl,-soname,{torch_cuda.name}"], check=True)
    subprocess.run([*shared, probe, tmp_path / "probe.cpp", *headers, folder / "lib" / "libtorch_cpu.so"], check=True)
    done = subprocess.run([sys.executable, "-c", SEARCH, probe, torch_cuda], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
