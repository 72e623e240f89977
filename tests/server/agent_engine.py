"""A fake engine for agents: a template with tools and thinking, turns written as that template writes them, and a
prefix cache that remembers whole blocks of everything that was said.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine.outputs import SequenceOutput
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine, small_tokenizer

BLOCK = 16
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}
Call one as <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def agent_tokenizer() -> Tokenizer:
    return small_tokenizer(chat_template=TEMPLATE)


def turn(text: str = "", *, thinking: str = "", calls: Sequence[tuple[str, dict[str, Any]]] = ()) -> str:
    """A model's turn as TEMPLATE writes it."""
    thought = f"<think>\n{thinking}\n</think>\n\n" if thinking else ""
    said = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    return thought + text + "".join(f"<tool_call>\n{call}\n</tool_call>" for call in said)


class AgentEngine(FakeEngine):
    """Says `turns`, one per request, the last of them for ever."""

    def __init__(self, turns: Sequence[str], **options: Any) -> None:
        tokenizer = agent_tokenizer()
        self._said = [
            [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_ids[0]] for text in turns
        ]  # fmt: skip
        self._known: list[tuple[int, ...]] = []  # everything whose keys and values are there
        self._num_cached = 0
        super().__init__(self._say, tokenizer=tokenizer, max_model_len=1 << 16, **options)

    def _say(self, prompt: Sequence[int], prompt_index: int, choice: int) -> Sequence[int]:
        said = self._said[min(len(self.admitted), len(self._said)) - 1]
        self._num_cached = max((_common(known, prompt) for known in self._known), default=0)
        self._known.append((*prompt, *said[:-1]))  # the last token is never computed
        return said

    def _output(
        self, key: tuple[int, int], left: dict[tuple[int, int], list[int]], params: SamplingParams
    ) -> SequenceOutput:
        output = super()._output(key, left, params)
        return SequenceOutput(
            *key,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            top_logprobs=output.top_logprobs,
            finish_reason=output.finish_reason,
            stop_token_id=output.stop_token_id,
            num_cached_tokens=self._num_cached,
        )


def _common(known: Sequence[int], prompt: Sequence[int]) -> int:
    """Tokens in whole blocks that both begin with; the last of the prompt is always computed."""
    length = 0
    for one, other in zip(known, prompt[:-1], strict=False):
        if one != other:
            break
        length += 1
    return length // BLOCK * BLOCK
