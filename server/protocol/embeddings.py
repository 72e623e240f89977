"""The wire types of /v1/embeddings, and its answer."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import partial
from typing import Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import BeforeValidator

from server.protocol.common import CacheSalt, Priority, Timeout
from server.protocol.completions import PROMPT_SCHEMA, read_prompts
from server.protocol.errors import InvalidRequest
from server.protocol.fields import WireModel

MAX_INPUTS = 2048  # OpenAI's
MAX_NUMBERS = MAX_INPUTS * 4096  # of one answer: some 100 MB as JSON


class EmbeddingRequest(WireModel):
    """Body of POST /v1/embeddings. pooling, normalize, add_special_tokens, cache_salt, timeout and priority are ours.

    pooling: "last" is the last token's hidden state, "mean" the mean over all. normalize: to length 1, unless it is
    false."""

    hints: ClassVar = frozenset({"user", "truncate"})

    model: str | None = None
    input: Annotated[
        tuple[str | tuple[int, ...], ...], BeforeValidator(partial(read_prompts, limit=MAX_INPUTS)), PROMPT_SCHEMA
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: CacheSalt = None
    timeout: Timeout = None
    priority: Priority = None

    def check_dimensions(self, hidden_size: int, *, may_shorten: bool) -> None:
        """Raises InvalidRequest for a length that this model cannot give."""
        wanted = self.dimensions
        if wanted is None or wanted == hidden_size:
            return
        if not 1 <= wanted <= hidden_size:
            raise InvalidRequest(f"dimensions must be between 1 and {hidden_size}, got {wanted}.", param="dimensions")
        if not may_shorten:
            raise InvalidRequest(
                f"This model's embeddings have {hidden_size} dimensions and lose their sense when they are shortened: "
                "leave dimensions away.",
                param="dimensions",
            )

    def check_size(self, hidden_size: int) -> None:
        """Raises InvalidRequest for more numbers than one answer may hold."""
        length = self.dimensions or hidden_size
        if len(self.input) * length > MAX_NUMBERS:
            told = f"at most {MAX_NUMBERS // length} vectors of {length} numbers are given at once"
            raise InvalidRequest(f"input has {len(self.input)} texts: {told}.", param="input")

    def answer(self, vectors: Sequence[bytes], *, model: str, num_prompt_tokens: int) -> bytes:
        """vectors: float32, little endian, as the engine pooled them; one per input."""
        # row by row: as one call it would keep all other threads, and so the event loop, waiting for a second
        data = [orjson.Fragment(self._row(index, row)) for index, row in enumerate(self._shaped(vectors))]
        usage = {"prompt_tokens": num_prompt_tokens, "total_tokens": num_prompt_tokens}
        return orjson.dumps({"object": "list", "data": data, "model": model, "usage": usage})

    def _row(self, index: int, numbers: npt.NDArray[np.float32]) -> bytes:
        as_text = self.encoding_format == "base64"
        shown = base64.b64encode(numbers.tobytes()).decode() if as_text else numbers
        row = {"object": "embedding", "index": index, "embedding": shown}
        return orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)

    def _shaped(self, vectors: Sequence[bytes]) -> npt.NDArray[np.float32]:
        """[num_inputs, dimensions]: cut, then brought to length 1."""
        numbers = np.frombuffer(b"".join(vectors), dtype="<f4").reshape(len(vectors), -1)[:, : self.dimensions]
        if self.normalize is not False:
            lengths = np.sqrt(np.square(numbers.astype(np.float64)).sum(axis=1, keepdims=True))
            numbers = (numbers / np.where(lengths > 0, lengths, 1.0)).astype("<f4")
        return np.ascontiguousarray(numbers)
