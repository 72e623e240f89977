"""A sandbox for chat templates that also bounds what they cost: a template is part of a model's files, and whoever
made those may not wish us well.

Jinja's immutable sandbox keeps a template from our objects, not from our time and memory. Here every turn of a loop
and every call of a macro looks at the clock, and what puts texts or lists together (+, ~, *) looks at their length
first. What remains are single calls of filters and methods, of which each ends by itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_LENGTH = 64 << 20  # characters of a text
CHARS_PER_ENTRY = 8  # an entry of a list counts as so many
MAX_POWER_BITS = 4096


class TemplateTooSlow(SecurityError):
    """The rendering's time is over."""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Templates raise TemplateTooSlow when their time is over, and SecurityError for what grows too large."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._clock = threading.local()

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """What this thread renders inside has so much time."""
        self._clock.until = time.monotonic() + seconds
        try:
            yield
        finally:
            del self._clock.until

    def tick(self) -> str:
        """Called by what a template repeats."""
        if time.monotonic() > self._clock.until:
            raise TemplateTooSlow("it takes too long")
        return ""

    def joined(self, *parts: object) -> str:
        """What ~ does."""
        texts = [str(part) for part in parts]
        _check(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _check(_length(left) + _length(right))
        elif operator == "*":
            _check(_length(left) * right if isinstance(right, int) else 0)
            _check(_length(right) * left if isinstance(left, int) else 0)
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_POWER_BITS:
            raise SecurityError("it computes too large a number")
        return super().call_binop(context, operator, left, right)

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        """Jinja's own hook between parsing and compiling."""
        watched = Watched().visit(source)
        watched.set_environment(self)
        return super()._generate(watched, name, filename, defer_init)


class Watched(NodeTransformer):
    """The template with calls of `tick` and `joined`, under names that it cannot take for its own."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_tick(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_tick(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_tick(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)

    def _with_tick(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick", [], node.lineno), lineno=node.lineno))
        return node


def _call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    target = nodes.EnvironmentAttribute(name, lineno=line)
    return nodes.Call(target, arguments, [], None, None, lineno=line)


def _length(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return CHARS_PER_ENTRY * len(value)
    return len(value) if isinstance(value, (str, bytes)) else 0


def _check(length: int) -> None:
    if length > MAX_LENGTH:
        raise SecurityError("it makes too long a text")
