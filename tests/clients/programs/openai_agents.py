"""An agent of the OpenAI Agents SDK: ``openai_agents.py chat|responses [stream]``."""

import asyncio
import sys
from importlib.metadata import version

import openai
from agent import QUESTIONS, SYSTEM, Wire, run_tool, tell
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

WIRE = Wire()
MODEL = OpenAIChatCompletionsModel if "chat" in sys.argv else OpenAIResponsesModel


@function_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return run_tool("add", {"a": a, "b": b})


@function_tool
def multiply(a: int, b: int) -> str:
    """Multiplies two numbers."""
    return run_tool("multiply", {"a": a, "b": b})


async def main():
    set_tracing_disabled(True)
    http = openai.DefaultAsyncHttpxClient(event_hooks={"request": [WIRE.asent]})
    async with openai.AsyncOpenAI(http_client=http) as client:
        agent = Agent(
            name="calculator", instructions=SYSTEM, tools=[add, multiply],
            model=MODEL(model="policy", openai_client=client),
        )  # fmt: skip
        items = []
        for question in QUESTIONS:
            items.append({"role": "user", "content": question})
            if "stream" in sys.argv:
                result = Runner.run_streamed(agent, items)
                async for _ in result.stream_events():
                    pass
            else:
                result = await Runner.run(agent, items)
            WIRE.calls += len(result.raw_responses)
            items = result.to_input_list()
    tell(WIRE, items, **{"openai-agents": version("openai-agents"), "openai": openai.__version__})


asyncio.run(main())
