"""The embedded engine on virtual time: the same tokens; a decode step takes a second of a clock for which nobody waits.

So a training with everything that depends on time in it (generation beside the trainer, settings that are ``auto``)
repeats exactly, whatever else the machine does.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from april.engines.protocol import Capabilities
from april.engines.transformers.engine import TransformersEngine

T = TypeVar("T")

DECODE_STEP_S = 1.0
"""Virtual seconds of a decode step, however many are in it: where decoding is bound by memory."""
PREFILL_TOKEN_S = 1e-3
"""Virtual seconds of a token that is read again."""


class SameThread(Executor):
    """Runs what is submitted at once: a virtual loop waits for no thread."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Return the result of a call that has ended."""
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done


class TimedEngine(TransformersEngine):
    """The embedded engine; its ticks run where they are asked for, and then virtual time passes.

    Args:
        trained: the trainer's model.
        apart: whether it generates from weights of its own, as a server does; :meth:`hand_over` brings the new ones.
        options: as for :class:`TransformersEngine`.
    """

    def __init__(self, trained: PreTrainedModel, *, apart: bool = False, **options: Any) -> None:
        self._trained = trained
        super().__init__(copy.deepcopy(trained) if apart else trained, **options)
        self._thread.shutdown()
        self._thread = SameThread()  # type: ignore[assignment]
        if apart:
            self._capabilities = replace(self._capabilities, shares_weights=False)

    @property
    def capabilities(self) -> Capabilities:
        """Those of the embedded engine, or of one that has weights of its own."""
        return self._capabilities

    async def hand_over(self) -> None:
        """Copy the trainer's weights."""
        with torch.no_grad():
            for own, new in zip(self._model.parameters(), self._trained.parameters(), strict=True):
                own.copy_(new)

    async def _tick(self) -> Any:
        steps, prefilled = self.stats.decode_steps, self.stats.prefill_tokens
        self._ticking = True
        try:
            outputs, error = self._work()
            spent = (self.stats.decode_steps - steps) * DECODE_STEP_S
            await asyncio.sleep(spent + (self.stats.prefill_tokens - prefilled) * PREFILL_TOKEN_S)
        finally:
            self._ticking = False
        if error is not None:
            raise error
        return outputs, None
