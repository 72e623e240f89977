"""Plain `transformers.generate` in padded batches: what serving without paging comes to. Run as a script, in a process
of its own (the loadtest package itself imports no torch): one JSON job a line on stdin, one JSON answer a line on
stdout.

A job is {"batches": [{"prompts": [[ids]], "max_new_tokens": k}]}. Each batch is padded on the left to its longest
prompt, keeps a static KV of longest prompt + max_new_tokens for every row, and runs until its longest output is done.
The answer is {"seconds": s}. Loading and the first run of a shape (`warm`) are not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def load(source: Path, save_to: Path | None) -> Any:
    """A model folder or a GGUF file (dequantised; transformers wants the package accelerate for that), bfloat16,
    sdpa. save_to: also write it there as a folder."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    if source.suffix == ".gguf":
        options |= {"gguf_file": source.name, "quantization_config": GgufConfig(dequantize=True)}
        source = source.parent
    model = AutoModelForCausalLM.from_pretrained(source, **options).eval()
    if save_to is not None:
        model.save_pretrained(save_to)
        tokenizer_file = {"gguf_file": options["gguf_file"]} if "gguf_file" in options else {}
        AutoTokenizer.from_pretrained(source, **tokenizer_file).save_pretrained(save_to)
    return model


@torch.inference_mode()
def run_batch(model: Any, prompts: list[list[int]], max_new_tokens: int, cache: str) -> list[list[int]]:
    """Greedy, every row to the full length. Returns the new ids of each row."""
    longest = max(map(len, prompts))
    input_ids = torch.zeros(len(prompts), longest, dtype=torch.int64)  # [rows, longest], padded on the left with 0
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, longest - len(prompt) :] = 1
    output = model.generate(
        input_ids.to(model.device), attention_mask=attention_mask.to(model.device), max_new_tokens=max_new_tokens,
        min_new_tokens=max_new_tokens, do_sample=False, cache_implementation=cache, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    if output.shape[1] != longest + max_new_tokens:
        raise RuntimeError(f"generate gave {output.shape[1] - longest} tokens, not {max_new_tokens}")
    rows: list[list[int]] = output[:, longest:].tolist()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder or GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", choices=("static", "dynamic"), default="static")
    parser.add_argument("--save-to", type=Path, help="only write the model as a folder, for the other servers")
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    model = load(flags.model, flags.save_to)
    if flags.save_to is not None:
        return
    run_batch(model, [[1, 2, 3], [4, 5]], 4, flags.cache)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        batches = json.loads(line)["batches"]
        start = time.perf_counter()
        for batch in batches:
            run_batch(model, batch["prompts"], batch["max_new_tokens"], flags.cache)
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
