"""What a request must fit into: the vocabulary, the context, the memory that a beam search may need."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from engine.beam import num_blocks_needed, num_candidates
from engine.outputs import ModelInfo
from engine.sampling_params import BeamSearch, InvalidParameter, SamplingParams, StructuredOutput


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one loaded model. has_forms: whether text can be held to a form."""

    info: ModelInfo
    max_num_seqs: int
    has_forms: bool

    def check(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        """Raises InvalidParameter, which names the parameter, for what can never be served."""
        info = self.info
        params.check_vocabulary(info.vocab_size)
        if params.structured is not None and not self.has_forms:
            raise no_forms(params.structured)
        if params.structured is not None and params.beam is not None:
            param = params.structured.param
            raise InvalidParameter(param, f"{param} cannot be combined with beam search.")
        if not prompts:
            raise InvalidParameter("prompt", "At least one prompt is needed.")
        for prompt in prompts:
            if not prompt:
                raise InvalidParameter("prompt", "The prompt must hold at least one token.")
            try:
                ids = array("q", prompt)
            except (TypeError, OverflowError):
                raise InvalidParameter("prompt", "Token ids must be integers.") from None
            if min(ids) < 0 or max(ids) >= info.vocab_size:
                raise InvalidParameter(
                    "prompt", f"The prompt holds a token id outside the vocabulary of {info.vocab_size} tokens."
                )
            wanted = 1 if params.max_tokens is None else params.max_tokens
            if len(prompt) + wanted > info.max_model_len:
                raise InvalidParameter(
                    "prompt",
                    f"This model's maximum context length is {info.max_model_len} tokens. However, you requested "
                    f"{len(prompt) + wanted} tokens ({len(prompt)} in the prompt, {wanted} for the completion).",
                )
        if params.beam is not None:
            for length in set(map(len, prompts)):
                self._check_beam(params, params.beam, length)

    def _check_beam(self, params: SamplingParams, beam: BeamSearch, prompt_len: int) -> None:
        info, limit = self.info, self.max_num_seqs
        param = "n" if beam.width == params.n else "best_of"
        if beam.width > limit:
            raise InvalidParameter(
                param, f"A beam search may have at most {limit} hypotheses here, this one asks for {beam.width}."
            )
        if num_candidates(params, info.eos_token_ids) > info.vocab_size:
            raise InvalidParameter(param, "A beam search needs more tokens in the vocabulary than hypotheses.")
        room = info.max_model_len - prompt_len
        wanted = room if params.max_tokens is None else params.max_tokens
        needed = num_blocks_needed(beam, prompt_len, wanted, info.block_size)
        if needed > info.num_blocks:
            raise InvalidParameter(
                "max_tokens",
                f"A beam search of {beam.width} hypotheses, {prompt_len} prompt and {wanted} output tokens may need "
                f"{needed * info.block_size} tokens of KV memory, the server has {info.num_blocks * info.block_size}. "
                "Please reduce max_tokens or the number of hypotheses.",
            )


def no_forms(structured: StructuredOutput) -> InvalidParameter:
    return InvalidParameter(structured.param, f"{structured.param}: this engine holds no text to a form.")
