"""The real driver on simulated engines and virtual time, with a record of what the engines really handed over.

One decode step takes one virtual second, so a response of 7 tokens that starts at t = 0 ends at t = 7.
"""

from __future__ import annotations

import asyncio
import gc
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from april.config.settings import Config
from april.core.batch import Batch, DeliveredSample
from april.core.tape import SegmentKind
from april.core.types import DropReason, FinishReason, Prompt, Sample
from april.core.versions import PolicyVersion
from april.engines.protocol import Capabilities, Request
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.engine import SimulatedEngine, synthetic_response
from april.errors import EngineError
from april.testing import recording_engine, rollouts, same_loop
from april.testing.virtual_clock import run_virtual

VOCAB, EOS = 1000, 0
SECOND_PER_TOKEN = DecodeCost(1.0, 0.0, 0.0)

LengthOf = Callable[[int, int], int]


def prompt_ids(number: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Ids of the ``number``-th prompt; no two prompts are equal."""
    return np.array([number % 900 + 1, number // 900 + 1, 7], np.int32)


class Angles:
    """A tokenizer for which token 17 is the text ``<17>``; EOS is special."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join("" if i == EOS and skip_special_tokens else f"<{i}>" for i in ids)


class RecordingEngine(recording_engine.RecordingEngine):
    """A simulated engine, recorded. Faults are overrides, or troubles with its calls.

    Args:
        remote: it has weights of its own, as behind a server.
        slow: seconds that a call (pause, load, resume, close) takes before it is done.
        fails: the call that raises an EngineError, once.
    """

    hangs = ""
    """The call that never returns while it is named here."""

    def __init__(
        self, length_of: LengthOf, name: str = "e0", *, remote: bool = False,
        slow: Mapping[str, float] | None = None, fails: str = "", **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            SimulatedEngine(
                name,
                SECOND_PER_TOKEN,
                lambda request: length_of(*(request.sample_key or (0, 0))),
                **({"max_running": 64, "vocab_size": VOCAB, "eos_token_id": EOS} | options),
            )
        )
        self.remote, self.slow, self.fails = remote, slow or {}, fails

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, remote=self.remote)

    async def _trouble(self, call: str) -> None:
        if call in self.slow:
            await asyncio.sleep(self.slow[call])
        if call == self.fails:
            self.fails = ""
            raise EngineError(f"{self.name} cannot {call}")
        if call == self.hangs:
            await asyncio.Event().wait()

    async def pause(self) -> None:
        await self._trouble("pause")
        await super().pause()

    async def resume(self) -> None:
        await self._trouble("resume")
        await super().resume()

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        await self._trouble("load")
        await super().update_weights(version, path)

    async def close(self) -> None:
        await self._trouble("close")
        await super().close()

    def alter_request(self, request: Request) -> Request:
        assert request.attempt_id not in self.requests, "an attempt id was used twice"
        return request

    def tokens_of(self, sample: tuple[int, int]) -> list[int]:
        """Tokens handed over per attempt of one sample, in order."""
        return [
            sum(len(c.tokens) for c in self.yielded[attempt_id])
            for attempt_id, request in self.requests.items()
            if request.sample_key == sample
        ]


on_virtual_time = pytest.mark.on_virtual_time
"""For an ``async def`` test, or as a module's ``pytestmark`` for all of them: conftest runs it by :func:`virtual`."""


def virtual(program: Callable[[], Awaitable[None]]) -> None:
    """Run a test's program on virtual time; the :class:`Rollouts` that it has made are closed at its end.

    A task or stream that it forgot complains before the test is over.
    """

    async def main() -> None:
        await program()
        while _made:
            await _made.pop().close()

    _made.clear()
    run_virtual(main())
    gc.collect(1)  # only what is young: a full collection costs more than most tests


_made: list[Rollouts] = []
"""The rollouts of the test that runs."""


def now() -> float:
    """Virtual seconds."""
    return asyncio.get_running_loop().time()


async def by_first_token(prompt: Prompt, response: Any) -> float:
    """A reward that depends on what it was given."""
    return float(response.tokens[0] + len(response.tokens) / 1024)


class Rollouts(same_loop.Rollouts):
    """:func:`april.testing.rollouts` on recording engines, with checks of what comes out of them.

    ``changes`` are settings of :class:`april.Config`, and arguments of the scheduler by their names.
    """

    def __init__(
        self, length_of: LengthOf, *, n: int = 1, samples: int = 1, over: int | None = None,
        engines: Sequence[RecordingEngine] | None = None, prompts: Iterable[Any] | int = 10_000,
        reward: Callable[..., Any] | None = by_first_token, group_reward: Callable[..., Any] | None = None,
        check: bool = True, **changes: Any,
    ) -> None:  # fmt: skip
        self.length_of = length_of
        options = {name: changes.pop(name) for name in ("filter", "rollout", "tokenizer", "record") if name in changes}
        settings = {
            "rollout_batch_size": n, "n_samples_per_prompt": samples, "over_sampling_batch_size": over or n,
            "max_response_len": 1000, "function_timeout_s": None, "stall_timeout_s": None,
        } | changes  # fmt: skip
        made = rollouts(
            Config(**settings),
            engines=engines or [RecordingEngine(length_of)],
            prompts=[prompt_ids(i) for i in range(prompts)] if isinstance(prompts, int) else prompts,
            reward=None if group_reward else reward, group_reward=group_reward, check=check, **options,
        )  # fmt: skip
        super().__init__(made._scheduler)
        self.driver, self.core, self.settings = self._driver, self._driver.core, self._driver.core.settings
        _made.append(self)

    async def step(self) -> Batch:
        """The next batch, checked, and a weight update."""
        batch = await self.next_batch()
        self.check(batch)
        await self.weight_update()
        return batch

    # ---------------------------------------------------------------- checks

    def check(self, batch: Batch) -> None:
        """Every sample of a single-turn batch is the uncut synthetic response, with the versions of its chunks."""
        for sample in batch.samples:
            length = self.length_of(*sample.id)
            cut = length > self.settings.max_response_len
            count = min(length, self.settings.max_response_len)
            tokens, logprobs = synthetic_response(sample.prompt.token_ids, sample.id, 0, count, VOCAB, (EOS,))
            if not cut:
                tokens[-1] = EOS
            assert sample.tokens.tolist() == tokens.tolist(), sample.id
            assert sample.logprobs.tolist() == logprobs.tolist(), sample.id
            assert sample.finish is (FinishReason.LENGTH if cut else FinishReason.STOP)
            self.check_provenance(sample)
        owners = {(s.id, g.attempt_id) for s in batch.samples for g in s.segments}
        assert len(owners) == len({attempt_id for _, attempt_id in owners})
        self.check_ledger()

    def check_provenance(self, sample: DeliveredSample) -> None:
        """Each generated segment is, token for token and version for version, what its attempt handed over."""
        engines = {e.name: e for e in self.engines}
        used: dict[str, int] = defaultdict(int)
        for segment in sample.segments:
            if segment.kind is SegmentKind.ENVIRONMENT:
                assert not sample.loss_mask[segment.start : segment.start + segment.count].any()
                continue
            rows = [
                (int(t), float(p), c.version)
                for c in engines[segment.engine].yielded[segment.attempt_id]
                for t, p in zip(c.tokens, c.logprobs, strict=True)
            ]
            first = used[segment.attempt_id]
            used[segment.attempt_id] += segment.count
            where = slice(segment.start, segment.start + segment.count)
            assert rows[first : first + segment.count] == [
                (int(t), float(p), PolicyVersion(*map(int, v)))
                for t, p, v in zip(sample.tokens[where], sample.logprobs[where], sample.versions[where], strict=True)
            ]
            assert {row[2] for row in rows[first : first + segment.count]} == {segment.version}

    def check_ledger(self) -> None:
        """What april says it has observed is what the engines handed over, and every token is accounted for."""
        books = self.core.tokens
        assert self.core.observed_tokens() == sum(e.tokens for e in self.engines)
        assert books.observed == books.delivered + books.held + sum(books.dropped.values())
        prompts = self.core.prompts
        assert prompts.observed == prompts.delivered + prompts.held + sum(prompts.dropped.values())
        self.core.validate()

    @property
    def dropped(self) -> dict[DropReason, int]:
        return {reason: count for reason, count in self.core.tokens.dropped.items() if count}

    def sample(self, group: int, index: int) -> Sample:
        return self.core.buffer.groups[group].samples[index]

    async def close(self) -> None:
        """Close the driver; nothing may be left behind."""
        await super().close()
        assert all(e.open_streams == 0 for e in self.engines)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left


def table(lengths: dict[tuple[int, int], int], default: int = 5) -> LengthOf:
    """Response lengths by (group, index)."""
    return lambda group, index: lengths.get((group, index), default)
