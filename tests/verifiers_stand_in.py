"""Stands in for the package verifiers, as far as april asks for it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import aiohttp
import pytest


class Data(dict):  # type: ignore[type-arg]
    prompt_text = "#hello"
    model_validate = classmethod(lambda cls, data: cls(data))

    def model_dump(self, mode: str) -> dict[str, Any]:
        return dict(self)


class Task:
    def __init__(self, data: Data, config: Any = None) -> None:
        self.data, self.config = data, config

    data_type = staticmethod(lambda: Data)


@dataclass
class Environment:
    """Stands in for an Env: each agent of an episode asks once, by the name of its trace."""

    agents: tuple[bool, ...] = (True,)
    """Of each, whether it is trained."""
    errors: tuple[Any, ...] = ()
    up: int = 0
    served: int = 0
    said: list[Any] = field(default_factory=list)
    urls: set[str] = field(default_factory=set)
    before: Callable[[], Any] | None = None
    config: Any = field(default_factory=lambda: SimpleNamespace(taskset=SimpleNamespace(task="of the taskset")))

    @property
    def taskset(self) -> Any:
        class Taskset(list[Task]):
            task_type = staticmethod(lambda: Task)

        return Taskset(Task(Data(number=n)) for n in range(12))

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        self.up += 1
        self.served += 1
        assert self.up == 1
        here = asyncio.current_task()
        try:
            yield
        finally:
            assert asyncio.current_task() is here
            self.up -= 1

    async def run_episode(self, task: Task, context: Any, *, on_trace: Callable[[Any], None]) -> Any:
        assert self.up == 1
        assert task.config == "of the taskset"
        if self.before is not None:
            await self.before()
        self.urls.add(context.client.base_url)
        traces = []
        async with aiohttp.ClientSession() as http:
            for number, trainable in enumerate(self.agents):
                name = f"{task.data['number']}-{number}-{id(context)}"
                agent = SimpleNamespace(name=f"agent{number}", trainable=trainable)
                trace = SimpleNamespace(id=name, agent=agent, reward=number + 1.0, errors=())
                on_trace(trace)
                headers = {**context.client.headers, "X-Session-ID": name, "Authorization": "Bearer EMPTY"}
                body = {"messages": [{"role": "user", "content": f"{name} #hello"}]}
                url = f"{context.client.base_url}/chat/completions"
                async with http.post(url, json=body, headers=headers) as response:
                    answer = await response.json()
                    self.said.append(answer["choices"][0]["message"]["content"] if response.ok else answer["error"])
                traces.append(trace)
        return SimpleNamespace(ok=not self.errors, errors=self.errors, traces=traces)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    outer, inner = ModuleType("verifiers"), ModuleType("verifiers.v1")
    outer.__spec__ = ModuleSpec("verifiers", None)
    inner.EvalClientConfig = SimpleNamespace  # type: ignore[attr-defined]
    inner.Sampling = SimpleNamespace  # type: ignore[attr-defined]
    inner.ModelContext = lambda model, client, sampling: SimpleNamespace(client=client)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers", outer)
    monkeypatch.setitem(sys.modules, "verifiers.v1", inner)
