"""Texts in every format, and what they mean: (format, text, content, calls)."""

from __future__ import annotations

from typing import Any

Calls = list[tuple[str, Any]]
CITY = 'Köln 😀 {[\\"'  # as JSON writes it
MEANT = 'Köln 😀 {["'
WEATHER: Calls = [("get_weather", {"city": MEANT, "days": 2})]
TWO: Calls = [*WEATHER, ("now", {})]

DS = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
DSML = "｜DSML｜"

JSON_ARGUMENTS = '{"city": "' + CITY + '", "days": 2}'

SAMPLES: list[tuple[str, str, str, Calls]] = [
    # one call, several, words around them
    ("granite", '<|tool_call|>[{"name": "get_weather", "arguments": ' + JSON_ARGUMENTS + "}]", "", WEATHER),
    ("granite", 'Well.\n<|tool_call|>[{"name": "get_weather", "arguments": ' + JSON_ARGUMENTS +
     '}, {"name": "now", "arguments": {}}]\n\nDone.', "Well.\n\nDone.", TWO),
    ("nemotron", '<TOOLCALL>[{"name": "get_weather", "arguments": ' + JSON_ARGUMENTS + '}, {"name": "now"}]'
     "</TOOLCALL>", "", TWO),
    ("tool_calls", '<tool_calls>\n{"name": "get_weather", "arguments": ' + JSON_ARGUMENTS +
     '}\n{"name": "now", "arguments": {}}\n</tool_calls>', "", TWO),
    ("llama3_json", '{"name": "get_weather", "parameters": ' + JSON_ARGUMENTS + "}", "", WEATHER),
    ("llama3_json", '{"name": "get_weather", "parameters": ' + JSON_ARGUMENTS +
     '}; {"name": "now", "parameters": {}}', "", TWO),
    ("llama3_json", 'I see. <|python_tag|>{"name": "other", "parameters": {"a": "}"}}', "I see.",
     [("other", {"a": "}"})]),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}', "", [("now", {})]),
    ("llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ("llama3_json", '{"name": "now", "age": 5}', '{"name": "now", "age": 5}', []),
    ("llama3_json", '{"a": [1, 2]} is JSON', '{"a": [1, 2]} is JSON', []),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": ' + JSON_ARGUMENTS +
     '}, {"name": "now", "arguments": {}, "id": "abcdefghi"}]', "", TWO),
    ("mistral", "Ok. [TOOL_CALLS]get_weather[ARGS]" + JSON_ARGUMENTS + "[TOOL_CALLS]now[ARGS]{}", "Ok.", TWO),
    ("mistral", "[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]" + JSON_ARGUMENTS, "", WEATHER),
    ("mistral", "[TOOL_CALLS]get_weather" + JSON_ARGUMENTS + "\n", "", WEATHER),
    ("mistral", '[TOOL_CALLS]now[ARGS]{"a": "[TOOL_CALLS]x[ARGS]{}"}', "", [("now", {"a": "[TOOL_CALLS]x[ARGS]{}"})]),
    ("mistral", "[TOOL_CALLS] is a mark", "[TOOL_CALLS] is a mark", []),
    ("deepseek_v3", f"{DS[0]}{DS[1]}get_weather{DS[2]}{JSON_ARGUMENTS}{DS[3]}{DS[1]}now{DS[2]}{{}}{DS[3]}{DS[4]}",
     "", TWO),
    ("deepseek_v3", f"So:\n\n{DS[0]}{DS[1]}function{DS[2]}get_weather\n```json\n{JSON_ARGUMENTS}\n```{DS[3]}\n"
     f"{DS[1]}function{DS[2]}now\n```json\n{{}}\n```{DS[3]}{DS[4]}", "So:", TWO),
    ("deepseek_v3", f"{DS[0]}hm", f"{DS[0]}hm", []),
    ("kimi_k2", "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
     f"<|tool_call_argument_begin|>{JSON_ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.now:1"
     "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>", "I look.", TWO),
    ("pythonic", "[get_weather(city='Köln 😀 {[\"', days=2), now()]", "", TWO),
    ("pythonic", '[get_weather(city="a\\"b\\n", spot={"x": [1, None, True, -2.5], \'y\': {}}, hours=(1, 2))]', "",
     [("get_weather", {"city": 'a"b\n', "spot": {"x": [1, None, True, -2.5], "y": {}}, "hours": [1, 2]})]),
    ("pythonic", "[get_weather('Rome', 3, exact=True)]", "",
     [("get_weather", {"city": "Rome", "days": 3, "exact": True})]),
    ("pythonic", "[write_file(path='''a'b''', text=\"\"\"x\n'y' \"z\" \"\"\")]", "",
     [("write_file", {"path": "a'b", "text": "x\n'y' \"z\" "})]),
    ("pythonic", "[get_weather(city=5, days='7', level=1)]", "",
     [("get_weather", {"city": "5", "days": 7, "level": 1})]),
    ("pythonic", "[1, 2, 3]", "[1, 2, 3]", []),
    ("pythonic", "[other(a=1)]", "[other(a=1)]", []),
    ("pythonic", "A list: [now()]", "A list: [now()]", []),
    ("lfm2", "Right. <|tool_call_start|>[get_weather(city='Köln 😀 {[\"', days=2), now()]<|tool_call_end|>Done.",
     "Right.Done.", TWO),
    ("lfm2", "<|tool_call_start|>[get_weather(city='it's'), write_file(text='a, b')]<|tool_call_end|>", "",
     [("get_weather", {"city": "it's"}), ("write_file", {"text": "a, b"})]),
    ("olmo3", "<function_calls>\nget_weather(city='Köln 😀 {[\"', days=2)\nnow()\n</function_calls>", "", TWO),
    ("qwen3_coder", "Sure.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\n" + MEANT +
     "\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n"
     "</function>\n</tool_call>", "Sure.", TWO),
    ("qwen3_coder", "<tool_call><function=write_file><parameter=path>a</parameter><parameter=text>\n\n<b>\n"
     "</parameter> and <tool_call>\n</function>, \"\\n\"\n\n</parameter></function></tool_call>", "",
     [("write_file", {"path": "a", "text": '\n<b>\n</parameter> and <tool_call>\n</function>, "\\n"\n'})]),
    ("qwen3_coder", "<function=get_weather>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=spot>\n"
     '{"a": [1, "x"]}\n</parameter>\n<parameter=hours>\n[1, 2]\n</parameter>\n<parameter=level>\n1.5\n</parameter>\n'
     "<parameter=days>\nsoon\n</parameter>\n<parameter=city>\n5\n</parameter>\n</function>", "",
     [("get_weather", {"exact": True, "spot": {"a": [1, "x"]}, "hours": [1, 2], "level": 1.5, "days": "soon",
                       "city": "5"})]),
    ("qwen3_coder", '<tool_call>\n<function=now>\n{"a": 1}\n</function>\n</tool_call>', "", [("now", {"a": 1})]),
    ("qwen3_coder", "<tool_call>\nhm</tool_call>", "<tool_call>\nhm</tool_call>", []),
    ("qwen3_coder", "if a <function b", "if a <function b", []),
    ("functionary", 'Well. <function=get_weather>' + JSON_ARGUMENTS + "</function><function=now>{}</function>",
     "Well.", TWO),
    ("functionary", "<function=write_file><parameter=text>\nx</parameter></function> y", "y",
     [("write_file", {"text": "\nx"})]),
    ("minicpm", '<function name="get_weather"><param name="city">' + MEANT + '</param><param name="days">2</param>'
     '</function>\n<function name="now"></function>', "", TWO),
    ("minicpm", '<function name="write_file"><param name="text"><![CDATA[a\n</param> & ]]></param></function>', "",
     [("write_file", {"text": "a\n</param> & "})]),
    ("seed_oss", "\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>" + MEANT + "</parameter>\n"
     "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n"
     "</seed:tool_call>", "", TWO),
    ("seed_oss", "<seed:tool_call><function=write_file><parameter=text>\nx\n</parameter></function></seed:tool_call>",
     "", [("write_file", {"text": "\nx\n"})]),
    ("glm", "Hm.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>" + MEANT + "</arg_value>\n"
     "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>", "Hm.", TWO),
    ("glm", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>" + MEANT + "</arg_value><arg_key>days</arg_key>"
     "<arg_value>2</arg_value></tool_call><tool_call>now</tool_call>", "", TWO),
    ("glm", "a <tool_call> b c", "a <tool_call> b c", []),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">' + MEANT +
     '</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
     "</minimax:tool_call>", "", TWO),
    ("deepseek_v32", f'\n\n<{DSML}function_calls>\n<{DSML}invoke name="get_weather">\n<{DSML}parameter name="city" '
     f'string="true">{MEANT}</{DSML}parameter>\n<{DSML}parameter name="days" string="false">2</{DSML}parameter>\n'
     f'</{DSML}invoke>\n<{DSML}invoke name="now">\n</{DSML}invoke>\n</{DSML}function_calls>', "", TWO),
    ("deepseek_v4", f'<{DSML}tool_calls>\n<{DSML}invoke name="other">\n<{DSML}parameter name="a" string="true">1'
     f'</{DSML}parameter>\n<{DSML}parameter name="b" string="false">[1]</{DSML}parameter>\n</{DSML}invoke>\n'
     f"</{DSML}tool_calls>", "", [("other", {"a": "1", "b": [1]})]),
    ("gemma4", 'Yes.\n<|tool_call>call:get_weather{city:<|"|>' + MEANT + '<|"|>,days:2}<tool_call|><|tool_call>'
     "call:now{}<tool_call|>", "Yes.", TWO),
    ("gemma4", '<|tool_call>call:get_weather{spot:{a:[1,<|"|>x}<|"|>,{}],b:true,c:null},hours:[],city:7}'
     "<tool_call|>", "",
     [("get_weather", {"spot": {"a": [1, "x}", {}], "b": True, "c": None}, "hours": [], "city": "7"})]),
    ("functiongemma", "<start_function_call>call:get_weather{city:<escape>" + MEANT + "<escape>,days:2}"
     "<end_function_call><start_function_call>call:now{}<end_function_call>", "", TWO),
    ("gemma4", "<|tool_call>nothing", "<|tool_call>nothing", []),
    ("harmony", "<|channel|>final<|message|>Hello.", "Hello.", []),
    ("harmony", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
     "to=functions.get_weather <|constrain|>json<|message|>" + JSON_ARGUMENTS + "<|call|><|start|>assistant "
     "to=functions.now<|channel|>commentary json<|message|>{}<|call|>", "I look.", TWO),
    ("harmony", "No marks at all", "No marks at all", []),
]  # fmt: skip
