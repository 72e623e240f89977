"""POST /v1/embeddings: one vector per input, pooled from the model's last hidden states."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response
from starlette.types import Receive

from engine.outputs import QueueFull, RequestAtFault, RequestFailed, RequestTimedOut
from engine.sampling_params import SamplingParams
from server.engine_port import Generation
from server.front import Front, front_of, read
from server.observe import Observer
from server.openapi import takes
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.errors import CLIENT_CLOSED
from server.sse import client_gone
from server.terms import salt_of, terms_of

INPUTS_AT_ONCE = 128  # handed to the engine together: a long list must not fill the queue for everybody
TOKENS_AT_ONCE = 1 << 18
RETRY_S = 0.05  # the rest of a request that has begun waits for room in the queue

router = APIRouter()


@router.post("/v1/embeddings", openapi_extra=takes(EmbeddingRequest))
async def create_embeddings(request: Request) -> Response:
    """Embed one or more inputs."""
    front = front_of(request)
    body = await read(request, EmbeddingRequest)
    model = front.check_model(body.model)
    settings = front.settings
    body.check_dimensions(front.info.hidden_size, may_shorten=settings.embedding_dimensions)
    body.check_size(front.info.hidden_size)
    params = SamplingParams(max_tokens=0, pooling=body.pooling or settings.embedding_pooling)
    add_special = body.add_special_tokens is not False
    prompts = await front.in_turn(request, front.encoder.inputs, body.input, add_special_tokens=add_special)
    job = _Job(front, prompts, params, body, request)
    vectors = await job.run(request.receive)
    if vectors is None:
        return Response(status_code=CLIENT_CLOSED)  # nobody is there to read it
    answer = await asyncio.to_thread(body.answer, vectors, model=model, num_prompt_tokens=sum(map(len, prompts)))
    return Response(answer, media_type="application/json")


class _Job:
    """The prompts of one request on their way through the engine."""

    def __init__(
        self,
        front: Front,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        body: EmbeddingRequest,
        request: Request,
    ) -> None:
        self._front = front
        self._prompts = prompts
        self._params = params
        self._salt = salt_of(request, body)
        self._terms = terms_of(request, body, front.settings)
        self._label = str(request.scope.get("state", {}).get("request_id", ""))
        self._observer = Observer.of(request, front.metrics)
        self._adapter = front.adapter_of(body.model)
        self._vectors: list[bytes] = []
        self._num_done = 0  # more than vectors, until a portion is complete
        self._streams: list[Generation] = []
        self._observer.admitted(
            request, front.check_model(body.model), params, "", time.monotonic(), adapter=self._adapter,
            row_s=self._row_s,
        )  # fmt: skip
        self._num_cached = 0

    async def run(self, receive: Receive) -> list[bytes] | None:
        """One vector per prompt; None when the client left. Raises QueueFull, NotServing, RequestTimedOut,
        ApiError."""
        work = asyncio.create_task(self._all())
        watch = asyncio.create_task(client_gone(receive))
        failed = False
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            self._front.metrics.client_disconnected()
            return None
        except Exception:
            failed = True
            raise
        finally:
            work.cancel()
            watch.cancel()
            self._count(failed)

    async def _all(self) -> list[bytes]:
        for start, end in _portions([len(prompt) for prompt in self._prompts]):
            try:
                await self._some(start, self._prompts[start:end])
            except RequestFailed as error:
                raise self._front.error_view(error) from error
        return self._vectors

    async def _some(self, start: int, prompts: Sequence[Sequence[int]]) -> None:
        found: dict[int, bytes] = {}
        stream = await self._admitted(start, prompts)
        self._streams.append(stream)
        try:
            async for outputs in stream:
                for output in outputs:
                    if output.finish_reason == "timeout":
                        raise RequestTimedOut
                    if output.finish_reason in ("error", "abort"):
                        if output.error_param is not None:
                            raise RequestAtFault(output.error_param, output.error or "")
                        raise RequestFailed(output.error or "The request was aborted.")
                    if output.embedding is not None:
                        found[output.prompt_index] = output.embedding
                        self._num_cached += output.num_cached_tokens
                        self._observer.took(start + output.prompt_index, 0, 0, "stop")
                        self._num_done += 1
        finally:
            stream.close()
        self._vectors += [found[index] for index in range(len(prompts))]

    async def _admitted(self, start: int, prompts: Sequence[Sequence[int]]) -> Generation:
        """The first prompts are refused where there is no room; the others wait for it."""
        while True:
            try:
                return self._front.engine.generate(
                    prompts, self._params, cache_salt=self._salt, label=self._label, terms=self._terms,
                    adapter=self._adapter,
                )  # fmt: skip
            except QueueFull:
                if not start:
                    raise
                await asyncio.sleep(RETRY_S)

    def _count(self, failed: bool) -> None:
        self._observer.ended(
            sum(map(len, self._prompts)),
            0,
            self._num_cached,
            num_unfinished=len(self._prompts) - self._num_done,
            failed=failed,
            scheduled_s=self._row_s(),
        )

    def _row_s(self) -> float | None:
        return self._streams[0].scheduled_s if self._streams else None


def _portions(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(start, end) of the inputs that go to the engine together."""
    portions: list[tuple[int, int]] = []
    start = num_tokens = 0
    for index, length in enumerate(lengths):
        if index > start and (index - start == INPUTS_AT_ONCE or num_tokens + length > TOKENS_AT_ONCE):
            portions.append((start, index))
            start, num_tokens = index, 0
        num_tokens += length
    return [*portions, (start, len(lengths))]
