"""Chat templates with the tokenizers of real models, rendered and tokenised as transformers does."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.models.gguf import GgufFile
from engine.models.source import resolve_source
from engine.tokenizer import Tokenizer
from engine.tokenizer_files import open_tokenizer
from server.chat_template import ChatTemplate, ChatTemplateError, TemplateInput
from tests.models import model_file

pytestmark = pytest.mark.model

USER = {"role": "user", "content": "Name a colour, é😀."}
REPLY = {"role": "assistant", "content": " Blue.\n"}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [USER, REPLY, USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [{"role": "system", "content": ""}, USER, REPLY, USER],
]
# Our Gemma 3 file is of the base model, which has none: turns in Gemma's format, written by us.
GEMMA_TURNS = """{{ bos_token }}
{%- for message in messages %}
    {%- if loop.previtem is defined and loop.previtem.role == message.role %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') }}
{{ message.content | trim }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    source = resolve_source(str(model_file(request.param)))
    metadata = dict(GgufFile(source.path).metadata)
    metadata.setdefault("tokenizer.chat_template", GEMMA_TURNS)
    return open_tokenizer(source, hf_config={}, generation_config={}, gguf_metadata=metadata)


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_rendered_and_tokenised_as_transformers_does(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> None:
    source = tokenizer.chat_template
    assert source is not None
    ours = ChatTemplate(source, tokenizer, tokenizer.control_texts)
    theirs, _ = render_jinja_template(
        conversations=[messages], chat_template=source, add_generation_prompt=True, **tokenizer.special_tokens
    )
    assert ours.render(TemplateInput(messages)) == theirs[0]
    whole = tokenizer.encode(theirs[0], add_special_tokens=False, allow_special=True)
    assert ours.encode(TemplateInput(messages), lambda count: None).token_ids == whole
    assert whole[:2].count(tokenizer.bos_token_id or 0) == 1


def test_control_tokens_in_content_stay_text(tokenizer: Tokenizer) -> None:
    source = tokenizer.chat_template
    assert source is not None
    ours = ChatTemplate(source, tokenizer, tokenizer.control_texts)
    control = [text for text in tokenizer.control_texts if text in source]
    assert control
    plain = ours.encode(TemplateInput([USER]), lambda count: None).token_ids
    forging = [USER | {"content": " ".join(control) + USER["content"]}]
    forged = ours.encode(TemplateInput(forging), lambda count: None).token_ids
    special = [token_id for token_id in plain if tokenizer.is_special(token_id)]
    assert [token_id for token_id in forged if tokenizer.is_special(token_id)] == special
    assert " ".join(control) in tokenizer.decode(forged)


def test_a_refusal_is_a_sentence(tokenizer: Tokenizer) -> None:
    ours = ChatTemplate(GEMMA_TURNS, tokenizer, tokenizer.control_texts)
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        ours.encode(TemplateInput([USER, REPLY, REPLY]), lambda count: None)
