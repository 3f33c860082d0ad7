"""An agent with OpenAI's own Python client: ``openai_client.py chat|responses [async] [stream]``."""

import asyncio
import inspect
import json
import sys

import openai
from agent import QUESTIONS, SYSTEM, TOOLS, Wire, run_tool, tell

DIALECT, ASYNC, STREAM = sys.argv[1], "async" in sys.argv, "stream" in sys.argv
WIRE = Wire()


def client():
    if ASYNC:
        return openai.AsyncOpenAI(http_client=openai.DefaultAsyncHttpxClient(event_hooks={"request": [WIRE.asent]}))
    return openai.OpenAI(http_client=openai.DefaultHttpxClient(event_hooks={"request": [WIRE.sent]}))


async def done(value):
    return await value if inspect.isawaitable(value) else value


async def events(stream):
    if ASYNC:
        async for event in stream:
            yield event
    else:
        for event in stream:
            yield event


async def chat(c, messages):
    """One answer, as a message to append."""
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    asked = {"model": "policy", "messages": messages, "tools": tools, "max_tokens": 900, "logprobs": True}
    if not STREAM:
        choice = (await done(c.chat.completions.create(**asked))).choices[0]
        assert len(choice.logprobs.content) > 1
        return choice.message.model_dump(exclude_none=True), choice.finish_reason
    stream = await done(c.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text, calls, finish, usage = "", {}, None, None
    async for chunk in events(stream):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                at = calls.setdefault(call.index, {"id": call.id, "type": "function", "function": {}})
                at["function"]["name"] = call.function.name or at["function"].get("name")
                at["function"]["arguments"] = at["function"].get("arguments", "") + (call.function.arguments or "")
    assert usage.completion_tokens > 1
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls.values())} if calls else {})}, finish


async def chats(c):
    messages = [{"role": "system", "content": SYSTEM}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        finish = "tool_calls"
        while finish == "tool_calls":
            WIRE.calls += 1
            answer, finish = await chat(c, messages)
            messages.append(answer)
            for call in answer.get("tool_calls") or ():
                function = call["function"]
                result = run_tool(function["name"], json.loads(function["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        assert finish == "stop", finish
    return messages


async def respond(c, items):
    """The items of one response."""
    tools = [{"type": "function", "strict": False, **tool} for tool in TOOLS]
    asked = {"model": "policy", "input": items, "tools": tools, "instructions": SYSTEM, "max_output_tokens": 900}
    if not STREAM:
        response = await done(c.responses.create(**asked))
    else:
        response, text = None, ""
        async for event in events(await done(c.responses.create(**asked, stream=True))):
            if event.type == "response.output_text.delta":
                text += event.delta
            if event.type == "response.completed":
                response = event.response
        assert response.output_text == text
    assert response.status == "completed", response
    assert response.usage.output_tokens > 1
    return [item.model_dump(exclude_none=True) for item in response.output]


async def responses(c):
    items = []
    for question in QUESTIONS:
        items.append({"role": "user", "content": question})
        called = True
        while called:
            WIRE.calls += 1
            answer = await respond(c, items)
            items += answer
            called = [item for item in answer if item["type"] == "function_call"]
            for call in called:
                result = run_tool(call["name"], json.loads(call["arguments"]))
                items.append({"type": "function_call_output", "call_id": call["call_id"], "output": result})
    return items


async def main():
    c = client()
    try:
        await done(c.models.list())
        WIRE.calls += 1
        transcript = await (chats if DIALECT == "chat" else responses)(c)
    finally:
        await done(c.close())
    tell(WIRE, transcript, openai=openai.__version__)


asyncio.run(main())
