"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from server.fill_middle import FillMiddle
from server.front import Front, front_of, read
from server.openapi import takes
from server.protocol.completion_writer import CompletionWriter
from server.protocol.completions import CompletionRequest
from server.shown_prompt import ShownPrompt

router = APIRouter()


@router.post("/v1/completions", openapi_extra=takes(CompletionRequest, streams=True))
async def create_completion(request: Request) -> Response:
    """Continue one or more prompts."""
    front = front_of(request)
    body = await read(request, CompletionRequest, CompletionRequest.check)
    model = front.check_model(body.model)
    front.check_logprobs(body.logprobs, "logprobs")
    front.check_logprobs(body.prompt_logprobs, "prompt_logprobs")
    params = body.sampling_params(front.info.sampling_defaults, max_tokens=body.output_limit, logprobs=body.logprobs)
    params.check_vocabulary(front.info.vocab_size)
    prompts = await front.in_turn(request, _encode, front, body)
    if (count := body.num_prompt_alternatives) is not None:
        param = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        front.check_prompt_logprobs(sum(map(len, prompts)), count, num_told=body.num_told, param=param)
    shown = await front.in_turn(request, _show, front, body, prompts)
    writer = CompletionWriter(
        front.tokenizer,
        shown,
        n=body.num_told,
        model=model,
        fingerprint=front.info.system_fingerprint,
        logprobs=body.logprobs is not None,
        include_usage=body.include_usage,
        num_prompt_logprobs=body.prompt_logprobs,
        token_ids=bool(body.return_token_ids),
    )
    num_kept = body.num_told if params.n > body.num_told else None
    return await front.generate(request, body, prompts, params, writer, shown=shown, num_kept=num_kept)


def _encode(front: Front, body: CompletionRequest) -> list[Sequence[int]]:
    encoder = front.encoder
    if not body.suffix:
        return encoder.prompts(body.prompt, body.output_limit)
    middle = FillMiddle(front.tokenizer)
    after = encoder.text(body.suffix, add_special_tokens=False, param="suffix")
    before = [encoder.text(p, add_special_tokens=False) if isinstance(p, str) else p for p in body.prompt]
    return encoder.prompts([tuple(middle.prompt(each, after)) for each in before], body.output_limit)


def _show(front: Front, body: CompletionRequest, prompts: Sequence[Sequence[int]]) -> list[ShownPrompt]:
    hides = body.skip_special_tokens is not False
    echo = bool(body.echo)
    shown = []
    for prompt, token_ids in zip(body.prompt, prompts, strict=True):
        text = ""
        if echo:
            decode = front.tokenizer.decode
            text = prompt if isinstance(prompt, str) else decode(prompt, skip_special_tokens=hides)
        shown.append(ShownPrompt(front.tokenizer, token_ids, text, echo=echo, num_echoed=body.num_echoed))
    return shown
