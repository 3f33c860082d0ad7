"""Agents with OpenAI's client, in a process of their own: sessions of some turns, with a growing history, all at once.

Reads ``{"doors": [[base_url, api_key], ...], "turns": 4, "asks": {...}}`` from its standard input, and writes its CPU
time, the number of requests, and a digest of all answers to its output. ``asks`` are further arguments of each request.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from typing import Any

from openai import AsyncOpenAI

QUESTION = "question {turn} of session {session}: a tiny model counts to {number}, and the answer is what? "


def question(session: int, turn: int) -> str:
    """What the user says; about 100 words of it, so that the history is what a server would rather not read anew."""
    text = "".join(QUESTION.format(turn=turn, session=session, number=7 * n + session) for n in range(6))
    return text.strip()


async def _session(client: AsyncOpenAI, number: int, door: list[str], turns: int, asks: dict[str, Any]) -> list[str]:
    mine = client.with_options(base_url=door[0], api_key=door[1])
    messages: list[Any] = []
    said = []
    for turn in range(turns):
        messages.append({"role": "user", "content": question(number, turn)})
        reply = await mine.chat.completions.create(model="tiny", messages=messages, max_tokens=400, **asks)
        if reply.choices[0].finish_reason != "stop":
            raise SystemExit(f"an answer ended as {reply.choices[0].finish_reason}")
        said.append(reply.choices[0].message.content or "")
        messages.append({"role": "assistant", "content": said[-1]})
    return said


async def main() -> None:
    asked = json.load(sys.stdin)
    doors, turns, asks = asked["doors"], asked["turns"], asked["asks"]
    async with AsyncOpenAI(api_key="none", base_url=doors[0][0], max_retries=0, timeout=600.0) as client:
        before = time.process_time()
        answers = await asyncio.gather(*(_session(client, i, door, turns, asks) for i, door in enumerate(doors)))
        cpu_s = time.process_time() - before
    digest = hashlib.sha256(json.dumps(answers).encode()).hexdigest()
    json.dump({"cpu_s": cpu_s, "requests": len(doors) * turns, "digest": digest}, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
