"""An agent of Pydantic AI: ``pydantic_agent.py chat|responses|messages [stream]``."""

import asyncio
import json
import sys
from importlib.metadata import version

import anthropic
import openai
from agent import QUESTIONS, SYSTEM, Wire, run_tool, tell
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessagesTypeAdapter, ModelResponse
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

WIRE = Wire()
HOOKS = {"request": [WIRE.asent]}


def model(dialect):
    if dialect == "messages":
        client = anthropic.AsyncAnthropic(http_client=anthropic.DefaultAsyncHttpxClient(event_hooks=HOOKS))
        return AnthropicModel("policy", provider=AnthropicProvider(anthropic_client=client))
    client = openai.AsyncOpenAI(http_client=openai.DefaultAsyncHttpxClient(event_hooks=HOOKS))
    kind = OpenAIChatModel if dialect == "chat" else OpenAIResponsesModel
    return kind("policy", provider=OpenAIProvider(openai_client=client))


async def read_events(context, events):
    async for _ in events:
        pass


async def main():
    agent = Agent(model(sys.argv[1]), instructions=SYSTEM)

    @agent.tool_plain
    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        return run_tool("add", {"a": a, "b": b})

    @agent.tool_plain
    def multiply(a: int, b: int) -> str:
        """Multiplies two numbers."""
        return run_tool("multiply", {"a": a, "b": b})

    history = []
    for question in QUESTIONS:
        handler = read_events if "stream" in sys.argv else None
        result = await agent.run(question, message_history=history, event_stream_handler=handler)
        history = result.all_messages()
    WIRE.calls = sum(isinstance(message, ModelResponse) for message in history)
    said = json.loads(ModelMessagesTypeAdapter.dump_json(history))
    for message in said:  # what is of the moment, and not of the conversation
        for name in ("timestamp", "run_id", "conversation_id", "provider_details", "provider_url"):
            message.pop(name, None)
        for part in message["parts"]:
            part.pop("timestamp", None)
    tell(WIRE, said, **{"pydantic-ai-slim": version("pydantic-ai-slim")})


asyncio.run(main())
