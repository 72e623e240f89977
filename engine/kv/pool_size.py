"""How many blocks the KV pool of a device gets: arithmetic on what was measured, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import CacheConfig, StartError
from engine.memory import size_text

MAX_BLOCKS = 1 << 18  # unless more can be in use at once: small models would have millions, each a Python object


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes. free: nobody has taken it; reserved: this process's allocator has, in use or not. peak_reserved: weights
    and the largest step together, as the allocator holds them: what it loses between blocks is in it. beside_steps:
    what is taken for good beside them, such as recorded steps."""

    total: int
    free: int
    reserved: int
    peak_reserved: int
    beside_steps: int = 0

    @property
    def of_others(self) -> int:
        """Other processes', and what the driver and the kernels take for themselves."""
        return max(0, self.total - self.free - self.reserved)

    def room(self, share: float) -> int:
        """Left for the pool if `share` of the device is ours and others' together; 0 at the least."""
        return max(0, int(self.total * share) - self.of_others - self.peak_reserved - self.beside_steps)


def num_device_blocks(config: CacheConfig, memory: DeviceMemory, bytes_per_token: int, wanted_tokens: int) -> int:
    """config.memory_bytes rules when given; else all that config.gpu_memory_utilization leaves, up to MAX_BLOCKS or
    what `wanted_tokens` need, whichever is more. Raises StartError, with numbers, when not even two blocks fit."""
    per_block = config.block_size * bytes_per_token
    if config.memory_bytes is None:
        room = memory.room(config.gpu_memory_utilization)
        num_blocks = min(room // per_block, max(MAX_BLOCKS, -(-wanted_tokens // config.block_size)))
        why = f"--gpu-memory-utilization {config.gpu_memory_utilization:g} leaves {size_text(room)}"
    else:
        room = memory.room(1.0)
        if config.memory_bytes > room:
            raise StartError(
                f"--kv-cache-memory asks for {size_text(config.memory_bytes)}, but {_spelled(memory)}: "
                f"{size_text(room)} are left."
            )
        num_blocks = config.memory_bytes // per_block
        why = f"--kv-cache-memory is {size_text(config.memory_bytes)}"
    if num_blocks < 2:
        raise StartError(
            f"Too little memory for the KV cache: {why}, two blocks need {size_text(2 * per_block)}; "
            f"{_spelled(memory)}."
        )
    return num_blocks


def _spelled(memory: DeviceMemory) -> str:
    return (
        f"of the device's {size_text(memory.total)} weights and the largest step take "
        f"{size_text(memory.peak_reserved + memory.beside_steps)} and others {size_text(memory.of_others)}"
    )
