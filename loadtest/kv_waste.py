"""`loadtest kv_waste`: the PagedAttention paper's argument, with our own allocator in it.

One trace, one memory budget, four ways to keep the K/V. The paged ones run the engine's real KVCacheManager and
BlockAllocator; this is the only file of loadtest that imports the engine (its torch-free storey).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

from engine.kv.manager import KVCacheManager
from engine.sampling_params import SamplingParams
from engine.sequence import Request
from engine.sequence import Sequence as KvSequence
from loadtest.kv_contiguous import Contiguous, KvAllocator, KvRequest, Usage, tails
from loadtest.kv_simulator import SHARES, KvOutcome, Simulation
from loadtest.lengths import UsageError, parse_lengths
from loadtest.plots import plot_kv_waste
from loadtest.prompts import TokenIds
from loadtest.table import grid
from loadtest.trace import read_trace, trace_sessions
from loadtest.workloads import PlannedRequest, Workload

TOKEN_BYTES = 30 * 2 * 3 * 64 * 2  # SmolLM2-135M in bfloat16: layers, K and V, KV heads, head size, bytes


class Paged:
    """The engine's own allocator behind the simulator's interface."""

    def __init__(self, capacity: int, block_size: int, *, share_prefixes: bool) -> None:
        self.name = f"paged, blocks of {block_size}" + (", prefixes shared" if share_prefixes else "")
        self.capacity = capacity // block_size * block_size
        self.manager = KVCacheManager(capacity // block_size, block_size, enable_prefix_caching=share_prefixes)
        self._block_size = block_size
        self._sequences: dict[int, tuple[KvRequest, KvSequence]] = {}

    def slots_to_admit(self, request: KvRequest, num_tokens: int) -> int:
        sequence = self._new_sequence(request, num_tokens)
        return self.manager.num_blocks_to_admit(sequence, self.manager.match_prefix(sequence)) * self._block_size

    def admit(self, request: KvRequest, num_tokens: int) -> bool:
        sequence = self._new_sequence(request, num_tokens)
        match = self.manager.match_prefix(sequence)
        if self.manager.num_blocks_to_admit(sequence, match) > self.manager.num_free_blocks:
            return False
        cached = self.manager.begin(sequence, match)
        if not self._write(sequence, num_tokens - cached):
            self.manager.free(sequence)
            return False
        self._sequences[request.key] = request, sequence
        return True

    def grow(self, request: KvRequest) -> bool:
        _, sequence = self._sequences[request.key]
        sequence.append(request.token_ids[len(sequence.token_ids)])
        if self._write(sequence, 1):
            return True
        sequence.token_ids.pop()
        return False

    def release(self, request: KvRequest) -> None:
        _, sequence = self._sequences.pop(request.key)
        self.manager.free(sequence)

    def usage(self) -> Usage:
        allocator, size = self.manager.allocator, self._block_size
        held = self._sequences.values()
        reserved, internal = tails(
            [(len(each.block_tables[0]) * size, each.position, request.final_slots) for request, each in held]
        )
        logical = sum(sequence.position for _, sequence in held)
        return Usage(allocator.live_slots, reserved, internal, allocator.num_free * size, logical)

    def _new_sequence(self, request: KvRequest, num_tokens: int) -> KvSequence:
        params = SamplingParams(max_tokens=len(request.token_ids), ignore_eos=True)
        (sequence,) = Request(request.key, 0, request.token_ids[:num_tokens], params, seed=0).sequences
        sequence.max_output_tokens = len(request.token_ids)
        sequence.row = request.key
        return sequence

    def _write(self, sequence: KvSequence, num_tokens: int) -> bool:
        """A step of the engine's, in which the sequence computes num_tokens."""
        if not self.manager.allocate_slots(sequence, num_tokens, announce=False):
            return False
        sampled = sequence.schedule(num_tokens)
        sequence.retire(sequence.position, sampled)
        self.manager.commit(sequence)
        self.manager.take_deltas()
        return True


def make_requests(planned: Sequence[PlannedRequest], seed: int) -> list[KvRequest]:
    """Prompts of token ids with outputs made up for them."""
    random = Random(f"outputs-{seed}")
    requests = []
    for each in planned:
        assert isinstance(each.prompt, tuple)
        output = tuple(random.choices(range(30_000, 40_000), k=each.max_tokens))
        requests.append(KvRequest(each.index, each.prompt + output, len(each.prompt)))
    return requests


def compare_allocators(
    requests: Sequence[KvRequest], capacity: int, max_model_len: int, block_size: int = 16
) -> list[KvOutcome]:
    """The trace through all four. capacity: slots. Raises UsageError if a request is longer than max_model_len."""
    longest = max(len(request.token_ids) for request in requests)
    if longest > max_model_len:
        raise UsageError(f"The longest request has {longest} tokens, more than the {max_model_len} reserved for it.")
    allocators: list[KvAllocator] = [
        Contiguous(capacity, max_model_len),
        Contiguous(capacity, None),
        Paged(capacity, block_size, share_prefixes=False),
        Paged(capacity, block_size, share_prefixes=True),
    ]
    return [Simulation(allocator, requests).run() for allocator in allocators]


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "kv_waste", help="where KV memory goes under four allocators (no server needed)", allow_abbrev=False
    )
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--prompt-len", default="sharegpt-in")
    parser.add_argument("--output-len", default="sharegpt-out")
    parser.add_argument("--prefix-len", type=int, default=128, help="tokens of a system prompt before each prompt")
    parser.add_argument("--prefix-groups", type=int, default=4, help="different system prompts")
    parser.add_argument("--trace", type=Path, help="lengths from this file instead")
    parser.add_argument("--memory-mib", type=float, default=512, help="KV budget")
    parser.add_argument("--token-bytes", type=int, default=TOKEN_BYTES, help="K and V of one token in all layers")
    parser.add_argument("--max-model-len", type=int, default=2048, help="longer requests are left out")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="write a PNG")
    parser.set_defaults(command=command)


async def command(arguments: argparse.Namespace) -> int:
    """Always exit code 0: it measures, it does not judge."""
    if arguments.trace is not None:
        sessions = trace_sessions(read_trace(arguments.trace), TokenIds(), arguments.seed)
    else:
        lengths = parse_lengths(arguments.prompt_len), parse_lengths(arguments.output_len)
        workload = Workload(
            "kv_waste", arguments.requests, 1, *lengths, prefix_len=arguments.prefix_len,
            prefix_groups=arguments.prefix_groups,
        )  # fmt: skip
        sessions = workload.build(arguments.seed, TokenIds())
    requests = make_requests([session.turns[0] for session in sessions], arguments.seed)
    fitting = [request for request in requests if len(request.token_ids) <= arguments.max_model_len]
    if not fitting:
        raise UsageError(f"Every request is longer than {arguments.max_model_len} tokens.")
    capacity = int(arguments.memory_mib * 2**20) // arguments.token_bytes
    outcomes = compare_allocators(fitting, capacity, arguments.max_model_len, arguments.block_size)
    left_out = f" ({len(requests) - len(fitting)} longer ones left out)" if len(fitting) < len(requests) else ""
    print(f"{len(fitting)} requests{left_out}, pool of {capacity} slots ({arguments.memory_mib:g} MiB)\n")
    print(waste_table(outcomes))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    if arguments.plot is not None:
        plot_kv_waste(outcomes, arguments.plot)
    return 0


def waste_table(outcomes: Sequence[KvOutcome]) -> str:
    rows = [["allocator", *SHARES, "tokens/live slot", "batch", "max", "preempted", "steps"]]
    for each in outcomes:
        shares = [f"{each.shares.get(name, 0.0):.1%}" for name in SHARES]
        counts = [f"{each.batch:.1f}", str(each.max_batch), str(each.num_preemptions), str(each.num_steps)]
        rows.append([each.name, *shares, f"{each.sharing:.2f}", *counts])
    return grid(rows)
