"""`_C_cuda` as torch ops: loads without a driver and into a torch without CUDA, and serves what it says it serves."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.ops_library import library_candidates

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
