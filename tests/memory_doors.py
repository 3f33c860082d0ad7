"""Endpoints without a server: an agent asks its sample's door for the continuation of token ids, whatever they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from april.core.sampling import SamplingParams
from april.driver.llm import LLM, Completion, EndpointSample, GenerateFunction

_NUMBERS = itertools.count()
_OPEN: dict[str, MemoryDoor] = {}


@dataclass(eq=False)
class MemoryDoor:
    """What a client of one sample may ask; ``events`` says what it asked and heard, in order."""

    generate: GenerateFunction
    sampling: SamplingParams
    url: str
    key: str = ""
    heard: list[int] = field(default_factory=list)
    events: list[tuple[int, str, list[int]]] = field(default_factory=list)
    """(number of the request, "asks" or "hears", token ids)"""
    asked: int = 0

    async def ask(self, ids: Iterable[int], *, heard: bool = True, **changes: Any) -> Completion:
        """Continue token ids; not ``heard``: the client is gone when the answer comes."""
        self.asked += 1
        number, tokens = self.asked, [int(i) for i in ids]
        self.events.append((number, "asks", tokens))
        done = await self.generate(replace(self.sampling, **changes), np.array(tokens, np.int32))
        if heard:
            self.events.append((number, "hears", done.tokens.tolist()))
            self.heard.append(done.number)
        return done


class MemoryDoors:
    """In place of a Gateway."""

    def __init__(self, tokenizer: Any = None, renderer: Any = None, *_: float) -> None:
        self.closed = False
        self.opened = 0

    def load(self) -> None:
        """Nothing is needed."""

    def open(self, sample: EndpointSample, place: Any = None) -> MemoryDoor:
        """A door for one more sample."""
        assert not self.closed
        self.opened += 1
        door = MemoryDoor(sample.generate, sample.sampling, f"memory:{next(_NUMBERS)}")
        _OPEN[door.url] = door
        return door

    def close_endpoint(self, endpoint: MemoryDoor) -> list[int]:
        """Numbers of calls that a client has heard."""
        del _OPEN[endpoint.url]
        return endpoint.heard

    def close(self) -> None:
        self.closed = True


def door_of(llm: LLM) -> MemoryDoor:
    """The door of the sample whose function has this ``llm``."""
    return _OPEN[llm.base_url]


Row = tuple[list[int], list[int], list[int]]
"""Prompt, response and loss mask."""


def rows_of(events: list[tuple[int, str, list[int]]]) -> list[Row]:
    """The rows that a client's requests make: each continues the longest conversation that it extends, if nobody else
    is going on with that; what nobody has heard is in none.
    """
    chains: list[dict[str, Any]] = []
    of_request: dict[int, dict[str, Any]] = {}
    heard = {number for number, what, _ in events if what == "hears"}
    for number, what, ids in events:
        if what == "hears":
            chain = of_request[number]
            chain["all"] += ids
            chain["mask"] += [1] * len(ids)
            chain["busy"] = False
        else:
            free = [c for c in chains if not c["busy"] and ids[: len(c["all"])] == c["all"]]
            chain = max(free, key=lambda c: len(c["all"]), default={})
            if not chain:
                chain = {"prompt": len(ids), "all": [], "mask": [0] * len(ids), "busy": False}
                chains.append(chain)
            of_request[number] = chain
            chain["busy"] = True
            if number in heard:
                chain["mask"] += [0] * (len(ids) - len(chain["mask"]))
                chain["all"] = ids[:]
    rows = [(c["all"][: c["prompt"]], c["all"][c["prompt"] :], c["mask"][c["prompt"] :]) for c in chains]
    return sorted(row for row in rows if any(row[2]))
