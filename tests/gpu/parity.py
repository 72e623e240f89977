"""The engine from end to end on the device: greedy tokens against the engine on the CPU, and against itself in other
company.

    python -m tests.gpu.parity [--out FOLDER] [--dry]

A small model with random weights, bfloat16 on both sides. The two add in different orders, so where two tokens are
nearly as likely they may part; each row must agree up to the first such place, which the CPU's own logprobs tell. On
one side alone, bits are bits: a prompt gets the same tokens and logprobs alone, beside others, and in chunks.
Exits with 1 if not.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

from engine.llm import LLM, Completion
from engine.sampling_params import SamplingParams
from tests.gpu.place import Place, open_place
from tests.tiny import VOCAB_SIZE, tiny_folder

LENGTHS = (1, 2, 15, 16, 17, 70, 255, 257, 600)  # of prompts, around blocks of 16 and splits of 256
NEAR = 0.1  # a difference of logprobs that another order of adding may turn round
Prompts = Sequence[Sequence[int]]


def make_model(place: Place, parent: Path) -> Path:
    """Wide enough for every kernel's usual path: heads of 64, groups of 4."""
    return tiny_folder(
        parent, "llama", hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, num_hidden_layers=place.sized(4, 1),
    )  # fmt: skip


def open_engine(folder: Path, device: str, **settings: object) -> LLM:
    cache = str(folder / "cache")
    return LLM(str(folder), device=device, dtype="bfloat16", cache_dir=cache, memory_bytes=256 << 20, **settings)


def greedy(engine: LLM, prompts: Prompts, max_tokens: int) -> list[Completion]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
    return [completions[0] for completions in engine.generate(list(prompts), params, use_tqdm=False)]


def scores(engine: LLM, prompt: Sequence[int], token_ids: Sequence[int]) -> list[float]:
    """The logprobs that `engine` gives to token_ids after prompt."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    ((completion,),) = engine.generate([[*prompt, *token_ids]], params, use_tqdm=False)
    return completion.prompt_logprobs[len(prompt) - 1 :]


def against_cpu(place: Place, reference: LLM, prompts: Prompts, ours: list[Completion]) -> bool:
    theirs = greedy(reference, prompts, len(ours[0].token_ids))
    equal, margins, differences = 0, [], []
    for prompt, mine, wanted in zip(prompts, ours, theirs, strict=True):
        scored = scores(reference, prompt, mine.token_ids)
        pairs = list(zip(mine.token_ids, wanted.token_ids, strict=True))
        parting = next((place for place, (own, other) in enumerate(pairs) if own != other), None)
        equal += parting is None
        if parting is not None:
            margins.append(wanted.logprobs[parting] - scored[parting])
        differences += [abs(own - other) for own, other in zip(mine.logprobs, scored, strict=True)]
    fine = sum(margin < NEAR for margin in margins) + equal
    place.results.tell(
        "greedy rows as on the CPU", equal, f"of {len(prompts)}", share=fine / len(prompts),
        of="rows equal or parted by a near tie", aim=1.0, note=f"largest margin {max(margins, default=0.0):.3f}",
    )  # fmt: skip
    mean, most = sum(differences) / len(differences), max(differences)
    place.results.tell("logprobs, mean difference", mean, note=f"at most {most:.3f}")
    return fine == len(prompts)


def same_bits(one: Sequence[Completion], other: Sequence[Completion]) -> int:
    """Rows whose tokens and logprobs are equal."""
    pairs = zip(one, other, strict=True)
    return sum(a.token_ids == b.token_ids and a.logprobs == b.logprobs for a, b in pairs)


def against_itself(place: Place, what: str, together: list[Completion], otherwise: list[Completion]) -> bool:
    equal = same_bits(together, otherwise)
    place.results.tell(
        f"same bits {what}", equal, f"of {len(together)}", share=equal / len(together), of="rows", aim=1.0
    )
    return equal == len(together)


def main() -> int:
    place = open_place("engine", __doc__)
    random = Random(0)
    lengths = place.sized(LENGTHS, (1, 17, 40))
    prompts = [[random.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]
    max_tokens = place.sized(48, 6)
    with tempfile.TemporaryDirectory() as parent:
        folder = make_model(place, Path(parent))
        with open_engine(folder, place.device) as engine:
            together = greedy(engine, prompts, max_tokens)
            alone = [greedy(engine, [prompt], max_tokens)[0] for prompt in prompts]
        with open_engine(folder, place.device, max_num_batched_tokens=64, enable_prefix_caching=False) as engine:
            chunked = greedy(engine, prompts, max_tokens)
        with open_engine(folder, "cpu") as reference:
            fine = against_cpu(place, reference, prompts, together)
    fine &= against_itself(place, "alone, from the prefix cache", together, alone)
    fine &= against_itself(place, "in chunks", together, chunked)
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main())
