"""The pool and the runner of an engine on a CUDA device: what steps take is tried out, and the rest becomes blocks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.batch import NewRow, ScheduledBatch, ScheduledRow
from engine.config import CacheConfig, StartError
from engine.cuda_graph import CudaRecorder, DecodeGraphs, decode_buckets, padding
from engine.device import Device, give_back_memory, is_out_of_memory
from engine.device_batch import decode_forward
from engine.device_runner import DeviceRunner
from engine.kv.cache import KVCache, bytes_per_token
from engine.kv.pool_size import DeviceMemory, num_device_blocks
from engine.models.backbone import Backbone
from engine.sampling_params import SamplingParams
from engine.structured import GrammarStore

TRIAL_BLOCKS = 2
COSTLY = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, presence_penalty=0.5, logprobs=5)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a runner is made for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    pipeline_depth: int
    block_size: int
    may_record: bool = True  # decode steps as graphs

    @property
    def table_width(self) -> int:
        """Blocks of the longest sequence and the token behind it."""
        return -(-(self.max_model_len + 1) // self.block_size)


def size_pool(
    backbone: Backbone, device: Device, sizes: Sizes, config: CacheConfig, grammars: GrammarStore | None
) -> tuple[int, DeviceMemory]:
    """(blocks of the pool, what was measured). Raises StartError."""
    memory = measure(backbone, device, sizes, grammars)
    wanted_tokens = sizes.max_num_seqs * sizes.max_model_len
    per_token = bytes_per_token(backbone.layers, backbone.dtype)
    return num_device_blocks(config, memory, per_token, wanted_tokens), memory


def measure(backbone: Backbone, device: Device, sizes: Sizes, grammars: GrammarStore | None) -> DeviceMemory:
    """Compute the largest step, and the largest of those that will be recorded, over a cache of two blocks. Raises
    StartError if they do not fit."""
    cache = KVCache(backbone.layers, TRIAL_BLOCKS, sizes.block_size, backbone.dtype, device.torch_device)
    try:
        peak = _step_peak(backbone, cache, device, sizes, grammars)
        gc.collect()  # of the trial's runner nothing is left
        beside = 0
        if _records(backbone, sizes):
            beside = max(0, _recorded_peak(backbone, device, sizes) - _reserved(device))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise StartError(
            f"A step of --max-num-batched-tokens {sizes.max_num_batched_tokens} and --max-num-seqs "
            f"{sizes.max_num_seqs} does not fit into the memory of {device.name} beside the weights; lower them."
        ) from error
    finally:
        cache.detach(backbone.layers)
    del cache
    reserved = _reserved(device)
    return DeviceMemory(device.memory_total, device.free_memory(), reserved, peak, beside)


def _step_peak(backbone: Backbone, cache: KVCache, device: Device, sizes: Sizes, grammars: GrammarStore | None) -> int:
    runner = new_runner(backbone, cache, device, sizes, grammars)
    return _peak(device, lambda: runner.launch(largest_step(sizes)).result())


def _recorded_peak(backbone: Backbone, device: Device, sizes: Sizes) -> int:
    """Of the largest step that will be recorded; what it takes stays taken."""
    buffers = padding(sizes.max_num_seqs, sizes.table_width, device.torch_device)
    forward = decode_forward(backbone, sizes.max_model_len)
    return _peak(device, lambda: forward(buffers))


def _peak(device: Device, run: Callable[[], object]) -> int:
    """Bytes that the allocator held at most during `run`."""
    _reserved(device)
    torch.cuda.reset_peak_memory_stats(device.torch_device)
    run()
    torch.cuda.synchronize(device.torch_device)
    return torch.cuda.max_memory_reserved(device.torch_device)


def _reserved(device: Device) -> int:
    """Bytes, once all that is not in use has gone back."""
    give_back_memory()
    return torch.cuda.memory_reserved(device.torch_device)


def largest_step(sizes: Sizes) -> ScheduledBatch:
    """As many tokens and rows as the scheduler may ever put together, prompts as long as may be, every row drawing
    with all that a request may ask for. All of them lie in block 0, so what is computed means nothing."""
    lengths = []
    room = sizes.max_num_batched_tokens
    for waiting in range(min(sizes.max_num_seqs, room), 0, -1):
        lengths.append(min(sizes.max_model_len, room - (waiting - 1)))
        room -= lengths[-1]
    rows = [
        NewRow(
            row=row,
            token_ids=(0,) * length,
            num_prompt_tokens=length,
            block_tables=((0,) * -(-length // sizes.block_size),),
            params=COSTLY,
            seed_key=row,
            eos_token_ids=(),
        )
        for row, length in enumerate(lengths)
    ]
    return ScheduledBatch(
        step_id=-1,
        new_rows=tuple(rows),
        rows=tuple(ScheduledRow(row, 0, length, logits_from=row) for row, length in enumerate(lengths)),
    )


def new_runner(
    backbone: Backbone,
    cache: KVCache,
    device: Device,
    sizes: Sizes,
    grammars: GrammarStore | None,
    graphs: DecodeGraphs | None = None,
) -> DeviceRunner:
    return DeviceRunner(
        backbone,
        cache,
        device.lane(),
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        vocab_size=sizes.vocab_size,
        pipeline_depth=sizes.pipeline_depth,
        grammars=grammars,
        graphs=graphs,
    )


def ready_runner(
    backbone: Backbone, cache: KVCache, device: Device, sizes: Sizes, grammars: GrammarStore | None
) -> DeviceRunner:
    """With its decode steps recorded, and warm. Raises StartError."""
    try:
        runner = new_runner(backbone, cache, device, sizes, grammars, _record(backbone, device, sizes))
        runner.warm_up()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise StartError(
            f"The memory of {device.name} is full before the first request; lower --gpu-memory-utilization."
        ) from error
    return runner


def _records(backbone: Backbone, sizes: Sizes) -> bool:
    return sizes.may_record and backbone.is_capturable


def _record(backbone: Backbone, device: Device, sizes: Sizes) -> DecodeGraphs | None:
    if not _records(backbone, sizes):
        return None
    graphs = DecodeGraphs(
        decode_forward(backbone, sizes.max_model_len),
        CudaRecorder(device.torch_device),
        buckets=decode_buckets(sizes.max_num_seqs),
        table_width=sizes.table_width,
        device=device.torch_device,
    )
    graphs.capture()
    return graphs
