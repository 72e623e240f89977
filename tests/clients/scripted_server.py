"""A server whose model says what a script says: the real HTTP side, scheduler, block allocator and prefix cache over
a runner without weights. For clients that only make sense with a model that calls tools well.

python -m tests.clients.scripted_server PORT [NAME=VALUE of a setting ...]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.assembly import EngineParts, new_scheduler
from engine.async_engine import AsyncEngine
from engine.batch import RowOutput, ScheduledBatch, StepOutput
from engine.config import EngineConfig
from engine.outputs import ModelInfo
from engine.tokenizer import Tokenizer
from server import lifecycle, logs, settings
from tests.clients.script import script
from tests.server.fake_engine import small_tokenizer

TEMPLATE = (Path(__file__).parent / "agent_template.jinja").read_text(encoding="utf-8")


@dataclass(slots=True)
class Row:
    num_prompt_tokens: int
    reply: list[int]


@dataclass(frozen=True, slots=True)
class Done:
    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


class ScriptedRunner:
    """engine.loop.Runner: token i of a row's output is token i of what the script says to the row's prompt."""

    def __init__(self, tokenizer: Tokenizer, say: Callable[[str], str]) -> None:
        self._tokenizer = tokenizer
        self._say = say
        self._rows: dict[int, Row] = {}

    def launch(self, batch: ScheduledBatch) -> Done:
        for new in batch.new_rows:
            prompt = self._tokenizer.decode(new.token_ids[: new.num_prompt_tokens], skip_special_tokens=False)
            reply = self._tokenizer.encode(self._say(prompt), add_special_tokens=False)
            self._rows[new.row] = Row(new.num_prompt_tokens, [*reply, self._tokenizer.eos_token_ids[0]])
        outputs = []
        for scheduled in batch.rows:
            row = self._rows[scheduled.row]
            place = scheduled.num_computed + scheduled.num_scheduled - row.num_prompt_tokens
            token = () if scheduled.logits_from is None else (row.reply[place],)
            outputs.append(RowOutput(token_ids=token, logprobs=(-0.1,) * len(token)))
        return Done(StepOutput(batch.step_id, tuple(outputs)))


def load(config: EngineConfig) -> EngineParts:
    tokenizer = small_tokenizer(chat_template=TEMPLATE)
    info = ModelInfo(
        name="scripted",
        source="a script",
        architecture="Script",
        max_model_len=config.model.max_model_len or 1 << 19,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        dtype="float32",
        num_parameters=0,
        num_blocks=1 << 16,
        block_size=16,
        kv_bytes_per_token=0,
        num_threads=1,
        numeric_profile={},
        system_fingerprint="fp_script",
    )
    runner = ScriptedRunner(tokenizer, script)
    return EngineParts(runner, new_scheduler(config, info), tokenizer, info)  # type: ignore[arg-type]  # a runner all the same


def main() -> None:
    port, *values = sys.argv[1:]
    chosen = settings.load({"port": port, "log_format": "json", **dict(value.split("=", 1) for value in values)})
    logs.configure(chosen.log_level, chosen.log_format)
    config = chosen.engine_config()
    lifecycle.leave(lifecycle.serve(chosen, lambda: AsyncEngine(config, load), lifecycle.bind(chosen), None))


if __name__ == "__main__":
    main()
