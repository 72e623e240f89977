"""Which of several built libraries is taken, and what happens to one that cannot be loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from engine import ops_library


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two files that are no libraries, the first the newer one; the only candidates."""
    found = [tmp_path / "a.so", tmp_path / "b.so"]
    for age, path in enumerate(found):
        path.write_text("no library")
        os.utime(path, (1000 - age, 1000 - age))
    monkeypatch.setattr(ops_library, "library_candidates", lambda name="_C.so": list(found))
    return found


def test_the_newest_is_loaded(libraries: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert [ops_library.load(), ops_library.load_cuda()] == [libraries[0]] * 2
    assert loaded == [str(libraries[0])] * 2


def test_without_ops_nothing_runs_and_one_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_library, "library_candidates", lambda name="_C.so": [])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ImportError, match="run `make setup`"):
        ops_library.load()
    assert ops_library.load_cuda() is None


@pytest.mark.usefixtures("libraries")
def test_a_torch_without_cuda_looks_for_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert ops_library.load_cuda() is None


@pytest.mark.usefixtures("libraries")
def test_kernels_that_cannot_be_loaded_leave_the_cpu_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert ops_library.load_cuda() is None
    assert "The kernels for CUDA devices cannot be loaded" in caplog.text
    with pytest.raises(OSError, match=r"a\.so"):
        ops_library.load()
