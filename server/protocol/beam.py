"""Beam search on the wire: `use_beam_search` with `length_penalty` and `early_stopping`, as vLLM spells them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema

from engine.sampling_params import MAX_N, BeamSearch
from server.protocol.errors import InvalidRequest
from server.protocol.fields import WireModel

EARLY_STOPPING_SCHEMA = WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": "never"}, {"type": "null"}]})

# what a search would have to leave out, with the values that say nothing
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "temperature": (0.0, 1.0),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
}


class SearchFields(WireModel):
    """A search looks at the model's own distribution and finds the n likeliest outputs among `best_of` hypotheses."""

    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: Annotated[Any, EARLY_STOPPING_SCHEMA] = None

    def check_search(self) -> None:
        """Raises InvalidRequest for what a search cannot do, and for its parameters without one."""
        given = self.early_stopping
        if given is not None and not isinstance(given, bool) and given != "never":
            raise InvalidRequest('early_stopping must be true, false or "never".', param="early_stopping")
        if not self.use_beam_search:
            for param, silent in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, param) not in (None, silent):
                    raise InvalidRequest(f"{param} needs use_beam_search to be true.", param=param)
            return
        if getattr(self, "stream", None):
            raise InvalidRequest("A beam search cannot be streamed: its outputs are known at the end.", param="stream")
        for param, neutral in _NEUTRAL.items():
            value = getattr(self, param, None)
            if value is not None and value not in neutral:
                allowed = " or ".join(f"{each:g}" for each in neutral)
                raise InvalidRequest(
                    f"A beam search looks at the model's own distribution: {param} must be {allowed}, or absent.",
                    param=param,
                )

    def search(self, n: int, best_of: int | None) -> BeamSearch | None:
        """Raises engine.sampling_params.InvalidParameter for a value out of bounds."""
        if not self.use_beam_search:
            return None
        return BeamSearch(
            width=min(max(n, 1), MAX_N) if best_of is None else best_of,  # a wrong n is told as such
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=False if self.early_stopping is None else self.early_stopping,
        )
