"""The wire types of /tokenize and /detokenize."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


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
    tokens: list[int]
    skip_special_tokens: bool | None = None
