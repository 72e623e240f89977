"""A template of a hostile model file ends in time and does not fill the memory; honest ones say what they said."""

from __future__ import annotations

import threading

import pytest
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server import chat_template
from server.chat_template import ChatTemplate, ChatTemplateError, TemplateInput
from server.template_limits import LimitedEnvironment, TemplateTooSlow
from tests.server.fake_engine import small_tokenizer

ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops that print": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "calls": "{% macro m(n) %}{% if n %}{% call(x) m(n-1) %}{{ m(n-1) }}{% endcall %}"
    "{{ caller(1) if caller }}{% endif %}{% endmacro %}{% call(x) m(40) %}{% endcall %}",
    "names of ours": "{% macro tick() %}{% endmacro %}{% set environment = namespace(tick=tick) %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
}
GREEDY = {
    "~": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "+": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "+ of lists": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "* of lists": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x * 2 %}{% endfor %}",
    "*": "{{ 'a' * 10000000000 }}",
    "* from the left": "{{ 10000000000 * 'a' }}",
    "**": "{{ 9 ** 999999999 }}",
}
HONEST = (
    "{{ 1 + 2 }}{{ 'a' + b }}{{ [1] + [2] }}{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 2.0 ** 0.5 }}{{ 3 * 4 }}",
    "{{ 'a' ~ 1 ~ none ~ missing ~ b ~ [1] }}",
    "{% for i in range(7) if i % 2 %}{{ loop.index }}:{{ i }},{% else %}none{% endfor %}",
    "{% for i in [] %}x{% else %}none{% endfor %}",
    "{% for i in [[1, [2, [3]]]] recursive %}{% if i is iterable %}({{ loop(i) }}){% else %}{{ i }}{% endif %}"
    "{% endfor %}",
    "{% macro f(x, y='d') %}<{{ x }}{{ y }}{{ caller(2) if caller }}>{% endmacro %}{{ f(1) }}"
    "{% call(z) f(3) %}{{ z ~ '!' }}{% endcall %}",
    "{% set n = namespace(x=0) %}{% for i in range(4) %}{% set n.x = n.x + i %}{% endfor %}{{ n.x }}",
)


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_what_does_not_end_is_ended(source: str) -> None:
    environment = LimitedEnvironment()
    template = environment.from_string(source)
    with environment.within(0.05), pytest.raises(TemplateTooSlow):
        template.render()


@pytest.mark.parametrize("source", GREEDY.values(), ids=GREEDY)
def test_what_grows_without_end_is_refused_before_it_takes_the_memory(source: str) -> None:
    environment = LimitedEnvironment()
    template = environment.from_string(source)
    with environment.within(60), pytest.raises(SecurityError):
        template.render()


@pytest.mark.parametrize("source", HONEST)
def test_honest_templates_say_what_they_said(source: str) -> None:
    environment = LimitedEnvironment()
    wanted = ImmutableSandboxedEnvironment().from_string(source).render(b="ß")
    with environment.within(60):
        assert environment.from_string(source).render(b="ß") == wanted


def test_each_thread_has_a_time_of_its_own() -> None:
    environment = LimitedEnvironment()
    template = environment.from_string("{% for i in range(3) %}{{ i }}{% endfor %}")
    said: list[str] = []

    def other() -> None:
        with environment.within(60):
            said.append(template.render())

    with environment.within(0):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with pytest.raises(TemplateTooSlow):
            template.render()
    assert said == ["012"]


def test_a_client_is_told_that_the_template_is_at_fault_and_one_time_limit_holds_for_all_attempts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.05)
    template = ChatTemplate(ENDLESS["loops"], small_tokenizer(), [])
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(ChatTemplateError, match="takes too long over these messages"):
        template.render(TemplateInput(messages))
    monkeypatch.undo()
    template = ChatTemplate(GREEDY["~"], small_tokenizer(), [])
    with pytest.raises(ChatTemplateError, match="refuses these messages"):
        template.render(TemplateInput(messages))
