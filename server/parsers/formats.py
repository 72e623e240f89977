"""The table of formats: how each writes calls, and the marks by which a chat template gives it away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from server.parsers import harmony
from server.parsers.base import OutputParser
from server.parsers.gemma_calls import GemmaCalls, GemmaMarks
from server.parsers.json_calls import JsonCalls, JsonMarks
from server.parsers.named_calls import MistralCalls, NamedCalls, NamedMarks
from server.parsers.pythonic_calls import PythonicCalls, PythonicMarks
from server.parsers.schema import Tools
from server.parsers.tagged_calls import TaggedCalls, Tags

Shape = JsonMarks | NamedMarks | Tags | GemmaMarks | PythonicMarks | None


@dataclass(frozen=True)
class Kind:
    """One format. make: a parser for a request's tools. marks: texts that must reach the parser even where they are
    special tokens. shape: the row of its table, for grammars.

    written: the template has one of these sets of texts, all of it; known: the vocabulary has this token, which
    counts where the template tells no format; unlike: the template of another format, which shares some marks, has
    this. always: text without calls needs the parser, too."""

    name: str
    make: Callable[[Tools], OutputParser]
    marks: tuple[str, ...]
    shape: Shape = None
    written: tuple[tuple[str, ...], ...] = ()
    known: tuple[str, ...] = ()
    unlike: str | None = None
    always: bool = False


def _json(
    name: str,
    marks: JsonMarks,
    *written: tuple[str, ...],
    known: tuple[str, ...] = (),
    unlike: str | None = None,
) -> Kind:
    texts = (*marks.open, *marks.close)
    return Kind(name, lambda tools: JsonCalls(marks, tools), texts, marks, written, known, unlike)


def _named(name: str, marks: NamedMarks, *written: tuple[str, ...]) -> Kind:
    return Kind(name, lambda tools: NamedCalls(marks), marks.all, marks, written, (marks.call,))


def _tags(name: str, tags: Tags, *written: tuple[str, ...]) -> Kind:
    return Kind(name, lambda tools: TaggedCalls(tags, tools), tags.all, tags, written)


def _gemma(name: str, marks: GemmaMarks) -> Kind:
    return Kind(
        name,
        lambda tools: GemmaCalls(marks, tools),
        (marks.open, marks.close, marks.quote),
        marks,
        ((marks.open,),),
        (marks.open,),
    )


def _pythonic(name: str, marks: PythonicMarks, *written: tuple[str, ...]) -> Kind:
    known = (marks.open,) if marks.open else ()
    return Kind(name, lambda tools: PythonicCalls(marks, tools), (marks.open, marks.close), marks, written, known)


def _function_tags(open_: str, close: str, *, line_breaks: bool) -> Tags:
    return Tags(
        open_, close, "<function=", ">", "</function>", "<parameter=", ">", "", "</parameter>", line_breaks=line_breaks
    )


def _invoke_tags(prefix: str, block: str) -> Tags:
    return Tags(
        f"<{prefix}{block}>",
        f"</{prefix}{block}>",
        f'<{prefix}invoke name="',
        '">',
        f"</{prefix}invoke>",
        f'<{prefix}parameter name="',
        '">',
        "",
        f"</{prefix}parameter>",
        told={'" string="true">': True, '" string="false">': False},
    )


_DSML = "｜DSML｜"
_DEEPSEEK = NamedMarks(
    open="<｜tool▁calls▁begin｜>",
    call="<｜tool▁call▁begin｜>",
    name_end="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
    close="<｜tool▁calls▁end｜>",
    kind_first=True,
)
_SEED = _function_tags("<seed:tool_call>", "</seed:tool_call>", line_breaks=False)
_QWEN = _function_tags("<tool_call>", "</tool_call>", line_breaks=True)
_KIMI = NamedMarks(
    open="<|tool_calls_section_begin|>",
    call="<|tool_call_begin|>",
    name_end="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
    close="<|tool_calls_section_end|>",
    numbered=True,
)
_GLM = Tags(
    "<tool_call>", "</tool_call>", "", "", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
)  # fmt: skip
_MINIMAX = Tags(
    "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', '">', "</invoke>", '<parameter name="', '">', "",
    "</parameter>",
)  # fmt: skip

_MINICPM = Tags("", "", '<function name="', '">', "</function>", '<param name="', '">', "", "</param>", cdata=True)

# In the order in which they are looked for: what is written in fewer formats comes first.
KINDS: tuple[Kind, ...] = (
    _named("deepseek_v3", _DEEPSEEK, (_DEEPSEEK.call,)),
    _tags("deepseek_v32", _invoke_tags(_DSML, "function_calls"), (_DSML, "function_calls")),
    _tags("deepseek_v4", _invoke_tags(_DSML, "tool_calls"), (_DSML, "tool_calls")),
    _named("kimi_k2", _KIMI, (_KIMI.call,)),
    _tags("minimax_m2", _MINIMAX, (_MINIMAX.open,)),
    _tags(
        "seed_oss", _function_tags("<seed:tool_call>", "</seed:tool_call>", line_breaks=False), ("<seed:tool_call>",)
    ),
    _tags("glm", _GLM, ("<arg_key>", "<arg_value>")),
    _tags(
        "qwen3_coder", _function_tags("<tool_call>", "</tool_call>", line_breaks=True), ("<function=", "<parameter=")
    ),
    _tags("functionary", _function_tags("", "", line_breaks=False), ("<function=",)),
    _tags("minicpm", _MINICPM, ('<function name="', '<param name="')),
    _gemma("gemma4", GemmaMarks("<|tool_call>", "<tool_call|>", '<|"|>')),
    _gemma("functiongemma", GemmaMarks("<start_function_call>", "<end_function_call>", "<escape>")),
    Kind(
        "mistral",
        MistralCalls,
        (MistralCalls.OPEN, MistralCalls.CALL_ID, MistralCalls.ARGUMENTS),
        JsonMarks((MistralCalls.OPEN,)),
        ((MistralCalls.OPEN,),),
        (MistralCalls.OPEN,),
    ),
    Kind(
        "harmony",
        lambda tools: harmony.HarmonyCalls(),
        harmony.MARKS,
        None,
        ((harmony.CHANNEL, harmony.MESSAGE),),
        always=True,
    ),
    _pythonic(
        "lfm2",
        PythonicMarks("<|tool_call_start|>", "<|tool_call_end|>"),
        ("<|tool_call_start|>",),
        ("<|tool_list_start|>",),
    ),
    _json("nemotron", JsonMarks(("<TOOLCALL>",), ("</TOOLCALL>",)), ("<TOOLCALL>",)),
    _json("granite", JsonMarks(("<|tool_call|>",)), ("<|tool_call|>",), known=("<|tool_call|>",)),
    _json("tool_calls", JsonMarks(("<tool_calls>",), ("</tool_calls>",)), ("<tool_calls>",)),
    _json(
        "hermes",
        JsonMarks(("<tool_call>",), ("</tool_call>",)),
        ("<tool_call>",),
        known=("<tool_call>",),
        unlike="<invoke",
    ),
    _json(
        "llama3_json",
        JsonMarks(("<|python_tag|>",), bare=True),
        ('{"name": function name, "parameters"',),
        known=("<|python_tag|>",),
    ),
    _pythonic("olmo3", PythonicMarks("<function_calls>", "</function_calls>"), ("<function_calls>",)),
    _pythonic("pythonic", PythonicMarks(bare=True), ("[func_name1(",)),
)
