"""What the model of `scripted_server` says. It plays an agent: it thinks, calls the client's shell tool three times,
then answers. Imports nothing of the server, so that the clients' environment can read it too.
"""

from __future__ import annotations

import json

NUM_CALLS = 3
ANSWER = "All done, the number is 42."
SHELLS = {"Bash": "command", "exec_command": "cmd", "bash": "command"}  # tool name -> the argument with the command


def script(prompt: str) -> str:
    """What the model says after this prompt."""
    num_results = prompt.count("<tool_response>")
    shell = next((name for name in SHELLS if f'"name": "{name}"' in prompt), None)
    if shell is None:
        return "A short title"
    if num_results >= NUM_CALLS:
        return f"<think>\nThat is enough.\n</think>\n\n{ANSWER}"
    command = f"echo step-{num_results + 1}"
    arguments = {SHELLS[shell]: command} | ({"description": "Print a step"} if shell != "exec_command" else {})
    call = json.dumps({"name": shell, "arguments": arguments})
    return f"<think>\nStep {num_results + 1}.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"
