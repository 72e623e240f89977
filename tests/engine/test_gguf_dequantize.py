"""Every block format gives what the `gguf` package gives, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import _type_traits
from gguf.quants import dequantize as package_dequantize

from engine.models.dequantize import dequantize
from engine.models.gguf import GgufError

QUANTISED = sorted(_type_traits, key=lambda kind: kind.name)


def random_blocks(kind: GGMLQuantizationType, num_blocks: int) -> np.ndarray:
    """Random bytes whose float16 scales are finite: the top exponent bit of every byte pair is cleared."""
    _, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(kind.value).integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    return blocks & np.uint8(0xBF)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_equals_the_package(kind: GGMLQuantizationType) -> None:
    block_size, _ = GGML_QUANT_SIZES[kind]
    num_blocks = (1 << 16) // block_size + 3  # more than one run, the last one short
    blocks = random_blocks(kind, num_blocks)
    expected = torch.from_numpy(package_dequantize(blocks, kind)).view(-1)
    assert expected.abs().sum() > 0
    for dtype in (torch.float32, torch.bfloat16):
        got = dequantize(blocks.reshape(-1), kind, (num_blocks * block_size,), dtype)
        torch.testing.assert_close(got, expected.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_formats(dtype: torch.dtype) -> None:
    names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    values = torch.randn(3, 5).to(dtype)
    data = np.frombuffer(values.view(torch.uint8).numpy().tobytes(), np.uint8)  # read-only, as a mapped file is
    got = dequantize(data, GGMLQuantizationType[names[dtype]], (3, 5), torch.float32)
    assert torch.equal(got, values.float())
    got[0, 0] = 7.0
    assert data.tobytes() == values.view(torch.uint8).numpy().tobytes()


def test_a_format_without_rule_is_refused() -> None:
    kind = GGMLQuantizationType.Q8_1
    _, block_bytes = GGML_QUANT_SIZES[kind]
    with pytest.raises(GgufError, match="Q8_1"):
        dequantize(np.zeros(block_bytes, np.uint8), kind, (32,), torch.float32)
