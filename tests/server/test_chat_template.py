"""The chat template: the sandbox holds, text that spells control tokens stays text, nothing else changes."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tokenizer import Tokenizer
from server.chat_template import ChatTemplate, ChatTemplateError, TemplateInput, any_of
from server.raw_json import raw_object
from tests.server.fake_engine import CHATML, IM_END, IM_START, small_tokenizer

TOKENIZER = small_tokenizer()
CONTROL_IDS = {TOKENIZER.token_id(text) for text in TOKENIZER.control_texts}
pieces = st.lists(
    st.sampled_from([IM_START, IM_END, "<s>", "<|im_", "end|>", "the", " é😀", "\U000f0000", "\U00100001", "\n", "a"]),
    max_size=6,
).map("".join)


def template(source: str = CHATML, tokenizer: Tokenizer = TOKENIZER) -> ChatTemplate:
    return ChatTemplate(source, tokenizer, tokenizer.control_texts)


def encode(messages: list[dict[str, Any]], source: str = CHATML) -> list[int]:
    return template(source).encode(TemplateInput(messages), lambda count: None).token_ids


def user(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@given(st.text(alphabet="the <|>imé😀\n", max_size=30))
def test_ordinary_content_tokenises_as_the_whole_text_does(content: str) -> None:
    rendered = f"{IM_START}user\n{content}{IM_END}\n{IM_START}assistant\n"
    whole = TOKENIZER.encode(rendered, add_special_tokens=False, allow_special=True)
    assert encode(user(content)) == whole


@given(pieces, pieces)
def test_content_never_becomes_a_control_token(first: str, second: str) -> None:
    messages = [*user(first), {"role": "assistant", "content": second}, *user(first)]
    token_ids = encode(messages)
    control = [TOKENIZER.decode([t], skip_special_tokens=False) for t in token_ids if t in CONTROL_IDS]
    assert control == [IM_START, IM_END] * 3 + [IM_START]
    text = TOKENIZER.decode(token_ids, skip_special_tokens=False)
    wanted = "".join(f"{IM_START}{m['role']}\n{m['content']}{IM_END}\n" for m in messages) + f"{IM_START}assistant\n"
    assert text == wanted


def test_text_around_a_spelled_control_token_tokenises_as_plain_text() -> None:
    content = f"the {IM_END} the"
    plain = TOKENIZER.encode(f"user\n{content}", add_special_tokens=False, allow_special=False)
    assert encode(user(content))[1 : 1 + len(plain)] == plain


def test_every_string_of_a_message_is_guarded() -> None:
    source = "{{ messages[0].name }}{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    call = {"function": {"name": "f", "arguments": {f"k{IM_END}": [IM_START]}}}
    token_ids = encode([{"role": "user", "content": "", "name": IM_END, "tool_calls": [call]}], source)
    assert not CONTROL_IDS & set(token_ids)
    assert TOKENIZER.decode(token_ids) == f'{IM_END}{{"k{IM_END}": ["{IM_START}"]}}'


@given(pieces, st.sampled_from(['{"%": 1}', '{ "a":"%" }', '{"a": "\\u00e9%", "b": ["%"]}']))
def test_arguments_are_printed_as_they_were_written(text: str, written: str) -> None:
    written = written.replace("%", text.replace("\n", "\\n"))
    source = "{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
    call = {"function": {"name": "f", "arguments": raw_object(written)}}
    token_ids = encode([{"role": "assistant", "content": "", "tool_calls": [call]}], source)
    assert TOKENIZER.decode(token_ids, skip_special_tokens=False) == written
    assert not CONTROL_IDS & set(token_ids)


def test_escaped_control_tokens_in_arguments_stay_text() -> None:
    written = '{"a": "\\u003c|im_end|>"}'
    source = "{{ messages[0].tool_calls[0].function.arguments['a'] }}"
    call = {"function": {"name": "f", "arguments": raw_object(written)}}
    token_ids = encode([{"role": "assistant", "content": "", "tool_calls": [call]}], source)
    assert TOKENIZER.decode(token_ids) == IM_END
    assert not CONTROL_IDS & set(token_ids)


def test_control_tokens_the_template_writes_without_being_special() -> None:
    tokenizer = small_tokenizer(chat_template="<tool>{{ messages[0].content }}</tool>")
    assert tokenizer.control_texts >= {IM_START, IM_END}
    made = ChatTemplate("<tool>{{ messages[0].content }}</tool>", tokenizer, ["<tool>", "</tool>"])
    assert (
        tokenizer.decode(made.encode(TemplateInput(user("a</tool>b")), lambda count: None).token_ids)
        == "<tool>a</tool>b</tool>"
    )


def test_the_assistants_own_tags_stay_visible_to_the_template() -> None:
    source = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}|{% endfor %}</think>"
    made = ChatTemplate(source, TOKENIZER, ["</think>", *TOKENIZER.control_texts])
    said = f"thought</think>{IM_END}word"
    messages = [{"role": "assistant", "content": said}, *user(said)]
    token_ids = made.encode(TemplateInput(messages), lambda count: None).token_ids
    assert TOKENIZER.decode(token_ids) == f"{IM_END}word|{said}|</think>"
    assert not CONTROL_IDS & set(token_ids)


@given(st.lists(st.text(alphabet="<ab|>.*", max_size=4), max_size=8), st.text(alphabet="<ab|>.*", max_size=20))
def test_any_of_finds_the_longest_text_at_the_first_place(texts: list[str], text: str) -> None:
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    plain = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    assert any_of(texts).findall(text) == plain.findall(text)


def test_many_control_tokens_cost_little() -> None:
    pattern = any_of(f"<unused{number}>" for number in range(6000))
    began = time.process_time()
    assert pattern.findall("<unused" * 30_000 + "<" * 200_000 + "<unused5999>") == ["<unused5999>"]
    assert time.process_time() - began < 2  # one after the other: minutes


def test_bos_is_written_by_the_template_alone() -> None:
    tokenizer = small_tokenizer(adds_bos=True)
    made = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", tokenizer, tokenizer.control_texts)
    token_ids = made.encode(TemplateInput(user("a")), lambda count: None).token_ids
    assert token_ids[0] == tokenizer.bos_token_id
    assert token_ids[1] != tokenizer.bos_token_id
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "refuses"),
        ("{{ messages[0].content / 2 }}", "cannot handle"),
        ("{{ messages.__class__.__mro__ }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "refuses"),
        ("{% for i in range(1000000) %}x{% endfor %}", "cannot handle"),
        ("{% include 'file' %}", "cannot handle"),
    ],
)
def test_what_goes_wrong_inside_is_a_template_error(source: str, said: str) -> None:
    with pytest.raises(ChatTemplateError, match=said):
        encode(user("a"), source)


def test_developer_is_system_to_templates_that_do_not_know_it() -> None:
    messages = [{"role": "developer", "content": "d"}]
    assert template("{{ messages[0].role }}").render(TemplateInput(messages)) == "system"
    assert template("{# developer #}{{ messages[0].role }}").render(TemplateInput(messages)) == "developer"


def test_a_broken_template() -> None:
    with pytest.raises(ChatTemplateError, match="cannot be read"):
        template("{% for %}")


def test_what_published_templates_use() -> None:
    source = (
        "{%- set ns = namespace(n=0) -%}\n"
        "{% for message in messages %}\n"
        "    {% if message.role == 'system' %}{% continue %}{% endif %}\n"
        "    {% set ns.n = ns.n + 1 %}\n"
        "{% generation %}{{ message.content | trim }}{% endgeneration %}\n"
        "{% endfor %}\n"
        "{{ ns.n }} {{ strftime_now('%Y') | length }} {{ {'é': '<'} | tojson }} {{ tools is none }}"
    )
    rendered = template(source).render(TemplateInput([{"role": "system", "content": "s"}, *user(" the ")]))
    assert rendered == 'the1 4 {"é": "<"} True'


def test_the_rendered_length_is_checked_before_tokenising() -> None:
    made = template()
    for content in ("plain", f"with {IM_END}"):
        seen: list[int] = []
        made.encode(TemplateInput(user(content)), seen.append)
        assert seen[0] == len("user" + content + "rolecontent")
        assert seen[1] > seen[0]


def test_deep_nesting_is_refused() -> None:
    deep: Any = "x"
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(ChatTemplateError, match="nested"):
        encode([{"role": "user", "content": "", "tool_calls": deep}])


STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}"
    "{% if not loop.first and loop.previtem.role == m.role %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + STRICT


def talk(*words: str) -> TemplateInput:
    """Roles by first letter: "s:hello"."""
    roles = {"s": "system", "u": "user", "a": "assistant", "d": "developer"}
    return TemplateInput(
        [{"role": roles[word[0]], "content": word[2:]} for word in words], add_generation_prompt=False
    )


@pytest.mark.parametrize(
    ("source", "said", "told"),
    [
        (STRICT, ("s:a", "u:b", "a:c"), "[system:a][user:b][assistant:c]"),
        (STRICT, ("s:a", "s:b", "u:c"), "[system:a\n\nb][user:c]"),
        (STRICT, ("d:a", "d:b", "u:c", "u:d"), "[system:a\n\nb][user:c\n\nd]"),
        (STRICT, ("s:a", "u:b", "s:c", "a:d", "u:e"), "[system:a][user:b\n\nc][assistant:d][user:e]"),
        (NO_SYSTEM, ("s:a", "u:b", "a:c"), "[user:a\n\nb][assistant:c]"),
        (NO_SYSTEM, ("s:a", "s:b", "u:c", "u:d"), "[user:a\n\nb\n\nc\n\nd]"),
    ],
)
def test_what_a_template_refuses_is_told_in_plainer_words(source: str, said: tuple[str, ...], told: str) -> None:
    assert template(source).render(talk(*said)) == told


def test_what_cannot_be_told_plainer_is_refused_with_the_first_reason() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        template(STRICT).render(talk("u:a", "a:b", "a:c"))
