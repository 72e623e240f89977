"""The wire types of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated

from pydantic import FailFast

from server.protocol.fields import WireModel


class TokenizeRequest(WireModel):
    """Body of POST /tokenize. Special tokens around the text (BOS) are added unless refused, as in completions."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None


class DetokenizeRequest(WireModel):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], FailFast()]
    skip_special_tokens: bool | None = None
