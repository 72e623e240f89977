"""The wire types of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, FailFast


class TokenizeRequest(BaseModel):
    """Body of POST /tokenize. Special tokens around the text (BOS) are added unless refused, as in completions."""

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None


class DetokenizeRequest(BaseModel):
    """Body of POST /detokenize."""

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())

    model: str | None = None
    tokens: Annotated[list[int], FailFast()]
    skip_special_tokens: bool | None = None
