"""Models for a device: the same bits op by op and in place, weights on their way there, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.attention.base import LayerSpec, PagedLayer
from engine.attention.native import NativeAttention
from engine.config import DeviceConfig, ModelConfig, StartError
from engine.device import CPU, HOST, Device
from engine.models import attention_hook
from engine.models.allow import load_config
from engine.models.attention_hook import IMPLEMENTATION
from engine.models.backbone import Backbone
from engine.models.build import DummyTensors, build_tree, fill_dummy
from engine.models.config_facts import choose_dtype
from engine.models.fused import FusedModel
from engine.models.fused_parts import Frequencies
from engine.models.loader import load_model
from engine.models.prepare import check_heads, prepare
from engine.models.rope_table import PIECE, RopeTable
from engine.models.safetensors_files import Shard, open_folder
from engine.models.self_check import PagedRun, check_in_small, check_real, keeps_bits, plain_logits
from engine.models.verdict import VerdictStore
from engine.models.weights import FolderWeights
from tests.engine.recipes import EXPERTS, MAX_POSITIONS, RECIPES, VOCAB_SIZE, WIDE_NORMS, Stepwise, draw_tensors, rope
from tests.engine.tiny_configs import CONFIGS, plain_tree, relative
from tests.ops.device_reference import on_cpu
from tests.tiny import tiny_folder

META = torch.device("meta")  # takes tensors away as a GPU does, and computes nothing
H200 = Device(torch.device("cuda", 0), "NVIDIA H200", 1 << 37, (9, 0))


@pytest.fixture(autouse=True)
def hook() -> None:
    attention_hook.register()


@pytest.fixture
def device_ops() -> Iterator[None]:
    with on_cpu():
        yield


@pytest.mark.usefixtures("device_ops")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*RECIPES, "equal_norms"])
def test_in_place_it_computes_the_same_bits(name: str, dtype: torch.dtype) -> None:
    recipe = RECIPES["qk_norms" if name == "equal_norms" else name]
    if name == "equal_norms":
        recipe = replace(recipe, norms={**recipe.norms, "k_norm": recipe.norms["q_norm"]})
    tensors = draw_tensors(recipe, dtype, wide_norms=name in WIDE_NORMS)
    runs = []
    for in_place in (False, True):
        model = FusedModel(recipe, tensors, NativeAttention(), MAX_POSITIONS, stepwise=True)
        assert model.decoder is None
        model.writes_in_place = in_place
        run = PagedRun(Backbone(model, batch_invariant=True, num_parameters=0))
        first = run.step([(0, list(range(20))), (1, [5, 6, 7])])
        runs.append([*first, *run.step([(1, [8]), (0, [VOCAB_SIZE - 1, 4])])])
    for ours, theirs in zip(*runs, strict=True):
        if name != "equal_norms":
            assert torch.equal(ours, theirs)
        else:  # the norm within the call is the reference's own, in other roundings than the op's
            assert relative(ours, theirs) < (1e-5 if dtype == torch.float32 else 3e-2)


def test_a_mixture_of_experts_is_not_recorded() -> None:
    models = [FusedModel(one, draw_tensors(one, torch.float32), Stepwise(), 64) for one in (EXPERTS, RECIPES["plain"])]
    assert [model.is_capturable for model in models] == [False, True]


def test_in_small_a_model_is_checked_op_by_op_as_the_device_computes() -> None:
    verdict = check_in_small(load_config(CONFIGS["qwen3"]), NativeAttention(), fuse=True, stepwise=True)
    assert verdict.difference < 1e-5
    assert verdict.batch_invariant


def test_bits_of_the_real_weights_are_compared_too() -> None:
    class Neighbourly(NativeAttention):
        def attend(self, query: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
            rows = super().attend(query, *args, **options)  # type: ignore[arg-type]
            return rows * (1 + 1e-6 * query.shape[0])

    for backend, expected in ((NativeAttention(), True), (Neighbourly(), False)):
        tree = plain_tree("llama")
        attention_hook.select_implementation(tree, IMPLEMENTATION)
        assert keeps_bits(prepare(tree, backend, 1024, fuse=False)) is expected


# ---- rotary tables


@pytest.mark.parametrize("limit", [4096, 100])
def test_a_table_that_grew_is_the_table_that_was_made_whole(limit: int) -> None:
    source = Frequencies(rope(16))
    grown, whole = (RopeTable(source, (), torch.bfloat16, limit) for _ in range(2))
    for position in (1, 2049, 2050, 4096):
        grown.cover(min(position, limit))
    whole.cover(limit)
    for ours, theirs in zip(grown.rows(), whole.rows(), strict=True):
        assert len(ours) >= limit
        assert torch.equal(ours[:limit], theirs[:limit])


def test_tables_move_and_grow_where_they_are() -> None:
    table = RopeTable(Frequencies(rope(16)), (), torch.float32, 8192)
    table.move_to(META)
    table.cover(3000)
    other = RopeTable(Frequencies(rope(16)), (), torch.float32, 8192, META)
    other.cover(3000)
    for rows in (*table.rows(), *other.rows()):
        assert rows.device == META
        assert rows.shape[0] >= 3000
        assert rows.shape[0] % PIECE == 0


# ---- weights on their way


def test_streamed_tensors_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    reader_of = Shard.reader

    def noting(shard: Shard) -> Callable[[str], torch.Tensor]:
        reader = reader_of(shard)
        return lambda name: read.append(name) or reader(name)

    monkeypatch.setattr(Shard, "reader", noting)
    folder = tiny_folder(tmp_path, "llama")
    weights = FolderWeights(folder)
    streamed = weights.streamed(torch.bfloat16)
    assert read == []
    assert set(streamed) == set(weights.shapes)
    assert len(streamed) == len(weights.shapes)
    expected = dict(weights.tensors(torch.bfloat16))
    for name in sorted(expected):
        assert name in streamed
        assert streamed[name].dtype == torch.bfloat16
        assert torch.equal(streamed[name], expected[name])
    assert set(read) == set(expected)
    assert "model.nothing" not in streamed


def test_a_tensor_of_a_shard_by_name(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    read = open_folder(tmp_path)[0].reader()
    assert all(torch.equal(read(name), tensors[name]) for name in tensors)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_dummy_weights_that_share_memory_are_the_same_numbers(name: str) -> None:
    config = load_config(CONFIGS[name])
    plain, shared = (build_tree(config, torch.bfloat16, IMPLEMENTATION) for _ in range(2))
    fill_dummy(plain, 3)
    fill_dummy(shared, 3, shared=True)
    ours, theirs = dict(shared.named_parameters()), dict(plain.named_parameters())
    matrices = [parameter for parameter in ours.values() if parameter.dim() >= 2]
    assert len({parameter.data_ptr() for parameter in matrices}) == 1
    made = DummyTensors(shared, HOST)
    assert set(made) == set(ours)
    assert len(made) == len(ours)
    for key, parameter in theirs.items():
        assert key in made
        assert torch.equal(ours[key], parameter)
        assert torch.equal(made[key], parameter)
    places = {made_one.data_ptr() for made_one in [made[key] for key in ours if ours[key].dim() >= 2]}
    assert len(places) == len(matrices)


def test_a_shared_dummy_tree_passes_the_check_and_serves() -> None:
    tree = build_tree(load_config(CONFIGS["llama"]), torch.float32, IMPLEMENTATION)
    fill_dummy(tree, 0, shared=True)
    expected = plain_logits(tree)
    check_real(prepare(tree, NativeAttention(), 1024, fuse=True, tensors=DummyTensors(tree, HOST)), expected)


# ---- what is refused


def test_precisions_of_a_cuda_device() -> None:
    assert choose_dtype("auto", "portable", "cuda") == "bfloat16"
    assert choose_dtype("float16", "amx", "cuda") == "float16"
    with pytest.raises(StartError, match="--dtype float32 is not served on a CUDA device"):
        choose_dtype("float32", "amx", "cuda")


def test_quantised_weights_are_refused_on_a_cuda_device(tmp_path: Path) -> None:
    config = ModelConfig(model=str(tiny_folder(tmp_path, "llama")), quantization="int8")
    with pytest.raises(StartError, match="--quantization int8 is not served on a CUDA device"):
        load_model(config, DeviceConfig(), backend=NativeAttention(), device=H200)


@pytest.mark.parametrize(("dim", "served"), [(64, True), (80, True), (256, True), (12, False), (320, False)])
def test_head_sizes_of_a_cuda_device(dim: int, served: bool) -> None:
    layers = [PagedLayer(0, LayerSpec(num_query_heads=2, num_kv_heads=2, key_dim=dim, value_dim=dim))]
    check_heads(layers, HOST)
    if served:
        check_heads(layers, H200.torch_device)
        return
    with pytest.raises(StartError, match=f"Attention heads of {dim} numbers"):
        check_heads(layers, H200.torch_device)


def test_verdicts_of_a_device_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.models.verdict.ops.CUDA_LIBRARY", Path(__file__))
    stores = [
        VerdictStore(str(tmp_path), "hash", torch.bfloat16, "native", device)
        for device in (CPU, H200, replace(H200, name="NVIDIA H100"))
    ]
    assert len({store._path for store in stores}) == 3
