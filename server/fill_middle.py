"""`suffix`: prompts that ask a model for what belongs between two texts, in the tokens it was trained with.

The order of the parts follows each family's published format; which one a model speaks shows in its vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.tokenizer import Tokenizer
from server.protocol.errors import InvalidRequest


class MiddleFormat(NamedTuple):
    """Spellings of the tokens before the prefix, before the suffix and before the middle ("" for none)."""

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool = False


FORMATS = (
    MiddleFormat("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen coder, CodeGemma, Granite 4
    MiddleFormat("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite code
    MiddleFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    MiddleFormat("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM code
    MiddleFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    MiddleFormat("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    MiddleFormat("[PREFIX]", "[SUFFIX]", "", suffix_first=True),  # Codestral
)


class FillMiddle:
    """One model's format. Raises InvalidRequest if it has none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._beginning = tokenizer.encode("")  # what the model expects before a text, if anything
        for form in FORMATS:
            ids = [tokenizer.token_id(text) for text in form[:3] if text]
            if all(token_id is not None for token_id in ids):
                self._prefix, self._suffix, *self._middle = [token_id for token_id in ids if token_id is not None]
                self._suffix_first = form.suffix_first
                return
        raise InvalidRequest(
            "suffix is not supported by this model: its tokenizer has no fill-in-the-middle tokens.", param="suffix"
        )

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """Token ids of the whole prompt, from those of the two texts."""
        parts = [[self._prefix, *before], [self._suffix, *after]]
        if self._suffix_first:
            parts.reverse()
        return [*self._beginning, *parts[0], *parts[1], *self._middle]
