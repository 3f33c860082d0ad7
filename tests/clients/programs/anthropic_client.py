"""An agent with Anthropic's own Python client: ``anthropic_client.py [async] [stream]``."""

import asyncio
import inspect
import sys

import anthropic
from agent import QUESTIONS, SYSTEM, TOOLS, Wire, run_tool, tell

ASYNC, STREAM = "async" in sys.argv, "stream" in sys.argv
WIRE = Wire()
ASKED = {
    "model": "policy", "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in TOOLS],
}  # fmt: skip


def client():
    if ASYNC:
        hooks = {"request": [WIRE.asent]}
        return anthropic.AsyncAnthropic(http_client=anthropic.DefaultAsyncHttpxClient(event_hooks=hooks))
    return anthropic.Anthropic(http_client=anthropic.DefaultHttpxClient(event_hooks={"request": [WIRE.sent]}))


async def done(value):
    return await value if inspect.isawaitable(value) else value


async def ask(c, messages):
    """One answer, as a message of Anthropic's."""
    asked = {**ASKED, "messages": messages}
    counted = (await done(c.messages.count_tokens(**asked))).input_tokens
    if not STREAM:
        answer = await done(c.messages.create(**asked, max_tokens=900))
    elif ASYNC:
        async with c.messages.stream(**asked, max_tokens=900) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            answer = await stream.get_final_message()
    else:
        with c.messages.stream(**asked, max_tokens=900) as stream:
            text = "".join(stream.text_stream)
            answer = stream.get_final_message()
    if STREAM:
        assert text == "".join(block.text for block in answer.content if block.type == "text")
    assert answer.usage.input_tokens == counted, (answer.usage, counted)
    assert answer.stop_reason in ("tool_use", "end_turn"), answer.stop_reason
    return answer


async def main():
    c, messages = client(), []
    try:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            going_on = True
            while going_on:
                WIRE.calls += 2
                answer = await ask(c, messages)
                blocks = [block.model_dump(exclude_none=True) for block in answer.content]
                messages.append({"role": "assistant", "content": blocks})
                results = [
                    {"type": "tool_result", "tool_use_id": block["id"],
                     "content": [{"type": "text", "text": run_tool(block["name"], block["input"])}]}
                    for block in blocks if block["type"] == "tool_use"
                ]  # fmt: skip
                going_on = bool(results)
                assert going_on == (answer.stop_reason == "tool_use")
                if results:
                    messages.append({"role": "user", "content": results})
    finally:
        await done(c.close())
    tell(WIRE, messages, anthropic=anthropic.__version__)


asyncio.run(main())
