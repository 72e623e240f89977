"""What the routes share: the engine, the settings, the metrics, and the common path of a generation.

A route parses its own body and says how its answer looks; everything between is here: the model's name, sampling
parameters, the engine's door, streamed or plain.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ParamSpec, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from engine.config import usable_cores
from engine.outputs import Phase
from engine.sampling_params import InvalidParameter, SamplingParams, StructuredOutput, UnusableForm
from engine.text import StopGate
from engine.tokenizer import StopStrings
from server.adapters import check_names
from server.assemble import Answer
from server.encode import PromptEncoder
from server.engine_port import Engine
from server.ignored import IgnoredFields
from server.metrics import Metrics
from server.observe import Observer
from server.protocol.answers import AnswerWriter
from server.protocol.common import GenerationRequest
from server.protocol.errors import ApiError, InvalidRequest, to_api_error
from server.protocol.parsing import Limits, Wire, parse, short
from server.protocol.tool_forms import ToolForms
from server.reading import ModelReader
from server.settings import Settings
from server.shown_prompt import ShownPrompt
from server.sse import EventStream, client_gone, collect
from server.terms import account_of, salt_of, terms_of
from server.turns import Turns

LARGE_BODY = 32 << 10  # bytes; parsing more would hold up the event loop
KEEP_ALIVE_S = 10.0  # a silent stream sends a comment this often: proxies give up after a minute
LIMITS = Limits()
NUM_THREADS = 3  # at least, for reading bodies and making prompts
MAX_PROMPT_LOGPROBS = 1 << 20  # of one request: prompt tokens, times alternatives, times choices
FEW_STOP_CHARS = 256

Args = ParamSpec("Args")
Result = TypeVar("Result")


class Front:
    """One per application, made when the model is loaded."""

    def __init__(self, engine: Engine, settings: Settings, metrics: Metrics) -> None:
        """Raises NotServing while the model loads, and StartError for a parser that is unknown, or for an adapter that
        is called like the model."""
        self.engine = engine
        self.settings = settings
        self.metrics = metrics
        self.info = engine.model_info
        self.tokenizer = engine.tokenizer
        self.encoder = PromptEncoder(self.tokenizer, self.info)
        self.reader = ModelReader(
            self.tokenizer, tool_parser=settings.tool_call_parser, reasoning_parser=settings.reasoning_parser
        )
        self.limits = LIMITS
        self.turns = Turns(max(NUM_THREADS, usable_cores() // 2))
        self.keep_alive_s = KEEP_ALIVE_S
        self.ignored = IgnoredFields(strict=settings.strict_fields)
        self.created = int(time.time())  # of the served models, as /v1/models tells
        self.adapters = {module.name: module for module in settings.lora_modules}
        check_names(settings.lora_modules, self.model_names)

    @cached_property
    def model_names(self) -> tuple[str, ...]:
        """The names the model itself answers to, the first of them the one that answers carry."""
        return self.settings.served_model_name or (self.info.name,)

    def check_model(self, name: str | None) -> str:
        """The name to put into the answer, the model's or an adapter's; no name means the model that is served.
        Raises ApiError 404."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names and name not in self.adapters:
            raise ApiError(404, f"The model {short(name)} does not exist.", param="model", code="model_not_found")
        return name

    def adapter_of(self, name: str | None) -> str:
        """What the engine knows the adapter by that a request names as its model; empty for the model itself."""
        return name if name is not None and name in self.adapters else ""

    def check_logprobs(self, count: int | None, param: str) -> None:
        """Raises InvalidRequest for more alternatives per token than the operator allows, or fewer than none."""
        limit = self.settings.max_logprobs
        if count is not None and not 0 <= count <= limit:
            raise InvalidRequest(f"{param} must be between 0 and {limit}, got {count}.", param=param)

    def check_prompt_logprobs(
        self, num_tokens: int, count: int, *, num_told: int = 1, param: str = "prompt_logprobs"
    ) -> None:
        """Before anything is computed: what the engine keeps and the answer spells out is bounded. count: alternatives
        of each of the `num_tokens`; num_told: how often they are told. Raises InvalidRequest."""
        limit = MAX_PROMPT_LOGPROBS
        if (wanted := num_tokens * (count + 1) * num_told) > limit:
            raise InvalidRequest(
                f"This request asks for {wanted} logprobs of prompt tokens, at most {limit} are allowed: send fewer "
                "or shorter prompts, or ask for fewer alternatives.",
                param=param,
            )

    async def generate(
        self,
        request: Request,
        body: GenerationRequest,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        writer: AnswerWriter,
        *,
        shown: Sequence[ShownPrompt] = (),
        num_kept: int | None = None,
        new_stop_gate: Callable[[], StopGate] | None = None,
        forms: ToolForms | None = None,
    ) -> Response:
        """`admit`, then `tell`."""
        answer = await self.admit(
            request, body, prompts, params, writer.id, shown=shown, num_kept=num_kept, new_stop_gate=new_stop_gate,
            forms=forms,
        )  # fmt: skip
        return await self.tell(answer, writer, request.receive, streamed=bool(body.stream))

    async def admit(
        self,
        request: Request,
        body: GenerationRequest,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        id: str,
        *,
        shown: Sequence[ShownPrompt] = (),
        num_kept: int | None = None,
        new_stop_gate: Callable[[], StopGate] | None = None,
        forms: ToolForms | None = None,
    ) -> Answer:
        """Hand the request to the engine. id: the answer's. shown, num_kept, new_stop_gate: see Answer. forms: what
        the request's tools ask of the compiler.

        Raises InvalidParameter, QueueFull, NotServing, RequestTimedOut, ApiError."""
        observer = Observer.of(request, self.metrics)
        await self._compile_all(params.structured, forms, request)
        stops = await _stop_strings(params.stop)
        asked_s = time.monotonic()
        adapter = self.adapter_of(body.model)
        stream = self.engine.generate(
            prompts,
            params,
            cache_salt=salt_of(request, body),
            label=_name_exchange(request.scope.get("state", {}), id),
            terms=terms_of(request, body, self.settings),
            adapter=adapter,
        )
        model = self.check_model(body.model)
        observer.admitted(request, model, params, id, asked_s, adapter=adapter, row_s=lambda: stream.scheduled_s)
        lengths = [len(prompt) for prompt in prompts]
        return Answer(
            stream, self.tokenizer, params, lengths, observer=observer, stops=stops, new_stop_gate=new_stop_gate,
            prompts=shown, num_kept=num_kept,
        )  # fmt: skip

    async def tell(self, answer: Answer, writer: AnswerWriter, receive: Receive, *, streamed: bool) -> Response:
        """The answer, plain when it is whole. Raises ApiError."""
        if not streamed:
            return await collect(answer, writer, receive, metrics=self.metrics, error_view=self.error_view)
        return EventStream(
            answer,
            writer,
            metrics=self.metrics,
            keep_alive_s=self.keep_alive_s,
            error_view=self.error_view,
        )

    async def _compile_all(
        self, structured: StructuredOutput | None, forms: ToolForms | None, request: Request
    ) -> None:
        """Raises as `_compile` does."""
        for definition in forms.definitions if forms is not None else ():
            await self._compile(definition, request)
        if structured is not None:
            try:
                await self._compile(structured, request)
            except UnusableForm as error:
                raise error if forms is None else forms.complaint(error) from None

    async def _compile(self, structured: StructuredOutput, request: Request) -> None:
        """Before admission, so that a bad grammar is a plain 400 also for a stream. Raises InvalidParameter,
        QueueFull, NotServing, and ClientDisconnect: who leaves must not hold a place in the compiler's queue."""
        started = time.monotonic()
        compiling = asyncio.ensure_future(self.engine.compile(structured, self._client(request)))
        gone = asyncio.ensure_future(client_gone(request.receive))
        try:
            await asyncio.wait({compiling, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not compiling.done():
                self.metrics.client_disconnected()
                raise ClientDisconnect
            cached = compiling.result()
        except InvalidParameter:
            self.metrics.grammar_failed()
            raise
        finally:
            compiling.cancel()
            gone.cancel()
        self.metrics.grammar(time.monotonic() - started, cached=cached)

    async def in_turn(
        self, request: Request, work: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs
    ) -> Result:
        """What a body makes us do before the engine knows of it, in a thread; clients take turns."""
        return await self.turns.run(self._client(request), work, *args, **kwargs)

    def _client(self, request: Request) -> str:
        """Whom a request comes from, so that clients can take turns: the key that let it in, else its address."""
        if (account := account_of(request)) is not None:
            return account.id
        return request.client.host if request.client is not None else ""

    def error_view(self, error: Exception) -> ApiError:
        """An engine that is on its way out fails requests of no fault of theirs: 503, try elsewhere."""
        if self.engine.phase is not Phase.READY:
            return ApiError(503, "The server is shutting down.", code="server_shutting_down")
        return to_api_error(error)


async def _stop_strings(stop: Sequence[str]) -> StopStrings | None:
    """A few words are prepared here and now, a long list in a thread."""
    if not stop:
        return None
    return StopStrings(stop) if sum(map(len, stop)) <= FEW_STOP_CHARS else await asyncio.to_thread(StopStrings, stop)


def _name_exchange(state: dict[str, Any], id: str) -> str:
    """Unless the client has named its request, it is called as its answer is, in header and log. Returns the name."""
    if not state.get("id_given"):
        state["request_id"] = id
        if (exchange := state.get("exchange")) is not None:
            exchange.request_id = id.encode()
    return str(state["request_id"])


def front_of(request: Request) -> Front:
    """The application's Front. Raises NotServing while the model loads."""
    return front_for(request.app)


def front_for(app: Starlette) -> Front:
    """Raises NotServing while the model loads, and, the first time, StartError for settings that do not fit it."""
    state = app.state
    front: Front | None = getattr(state, "front", None)
    if front is None:
        front = state.front = Front(state.engine, state.settings, state.metrics)
    return front


async def read(request: Request, kind: type[Wire], check: Callable[[Wire], None] | None = None) -> Wire:
    """The checked body of a request; what nobody reads of it is noted for the answer's header. Raises
    InvalidRequest."""
    front = front_of(request)
    body = await request.body()

    def parsed() -> tuple[Wire, list[str]]:
        wire = parse(body, kind, front.limits)
        names = front.ignored.find(wire)  # first, for a name that is mistyped is why another is missing
        if check is not None:
            check(wire)
        return wire, names

    wire, ignored = await front.in_turn(request, parsed) if len(body) > LARGE_BODY else parsed()
    front.ignored.note(request, ignored)
    return wire
