"""What the agents of these programs have in common: questions, tools, and what they tell at their end."""

import json
import sys

SYSTEM = "You are a calculator. Use the tools."
QUESTIONS = ["Add 2 and 3, then multiply the sum by 7.", "And one less than that?"]
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOLS = [
    {"name": "add", "description": "Adds two numbers.", "parameters": NUMBERS},
    {"name": "multiply", "description": "Multiplies two numbers.", "parameters": NUMBERS},
]


def run_tool(name, arguments):
    """The result of a tool call, as text."""
    a, b = arguments["a"], arguments["b"]
    return str(a + b if name == "add" else a * b)


class Wire:
    """Counts what is asked, and what is sent for it: a retry is sent and not asked."""

    def __init__(self):
        self.calls = 0
        self.requests = 0

    def sent(self, request):
        self.requests += 1

    async def asent(self, request):
        self.sent(request)


def tell(wire, transcript, **versions):
    """Write what was seen to standard output, as the program's last line."""
    seen = {"transcript": transcript, "versions": versions, "calls": wire.calls, "requests": wire.requests}
    json.dump(seen, sys.stdout)
