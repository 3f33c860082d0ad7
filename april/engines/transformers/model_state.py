"""The state that a model computes with beside its input: whether somebody has switched it while tokens were sampled.

Looked at are the switches of every module (flags, words, lists and tables of them: adapters, their scales, training
mode; its hooks, parts and parameters) and the weights. All of them after a tick; a part before each decode step, in
rotation, since that must cost next to nothing; and all of them when another thread calls the model, for whoever
switches it for a while does so for a call.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from april.engines.transformers.model_weights import ModelWeights
from april.errors import WeightsInUse

WHAT_TO_DO = (
    "the embedded engine reads the trainer's model in place, so step the optimizer between two batches, call "
    "weight_update(), and then ask for the next batch; to train while april generates, use an engine behind a server "
    "(vllm, sglang)"
)

HOLD_IT = (
    "the embedded engine reads the trainer's model in place, so switch it in rewards, rollout functions and threads "
    "only inside of `with april.hold_model(model):`, and leave it as it was; weight_update() clears this"
)


def guard_optimizers(engine: Any, weights: Any) -> weakref.finalize[Any, Any]:
    """Make ``step()`` of optimizers that hold ``weights.trained()`` raise WeightsInUse while ``engine.generating``.

    A counter of writes moves only after a write, and a fused step is one long write, or one that no counter sees: so
    steps are looked at before they begin. Calling the result, or the end of ``engine``, takes the guard away.
    """
    engine_ref, weights_ref = weakref.ref(engine), weakref.ref(weights)

    def before_step(optimizer: Optimizer, *_: object) -> None:
        generating, trained = engine_ref(), weights_ref()
        if generating is None or trained is None or not generating.generating:
            return
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if any(id(parameter) in held for parameter in trained.trained()):
            raise WeightsInUse(
                f"an optimizer step while {generating.name} generates from the same weights was refused, and nothing "
                f"was written: {WHAT_TO_DO}"
            )

    handle = register_optimizer_step_pre_hook(before_step)
    return weakref.finalize(engine, handle.remove)


GLANCE = 12
"""Switches, and tensors, that are looked at before a decode step; a 32nd of all if that is more."""
PATIENCE_S, LOOK_AGAIN_S = 10.0, 0.01
"""The time for which a model that others have switched is waited for, and how often it is looked at meanwhile."""
WRITTEN = "its weights were written"
_GONE, _NONE, _OURS = object(), object(), object()
_PLAIN = (bool, str, int, float, type(None))
T = TypeVar("T")
_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_modules", "_parameters")


class ModelState:
    """The state of one model, as it was noted and as it is; inside of ``generation_mode`` both times."""

    def __init__(self, model: Any, weights: ModelWeights) -> None:
        self._model, self._weights = model, weights
        self._switches: list[tuple[dict[str, Any], str, Any]] = []
        self._changing: set[tuple[type, str]] = set()
        """Switches that a model of this kind sets itself, in its forward pass."""
        self._places: list[tuple[Tensor, int]] = []
        self._steps = 0
        self._torn = ""
        self._decoder = 0
        """The thread that decodes."""
        self._hook = self._look  # one object: methods are made anew each time
        self.note_weights()

    def note(self) -> None:
        """Note what it is switched to now: that is what is to be generated with."""
        self._switches = []
        embeddings = set(_embeddings(self._model))
        for module in self._model.modules():
            own = vars(module)
            for name in {**own, "forward": None}:
                value = _switch(name, own.get(name, _GONE))
                # transformers hangs a hook there and takes it away, for gradients of frozen models
                if name == "_forward_hooks" and id(module) in embeddings:
                    continue
                if value is not _NONE and (type(module), name) not in self._changing:
                    self._switches.append((own, name, value))
        config = vars(self._model.config)
        attention = "_attn_implementation_internal"
        self._switches.append((config, attention, config.get(attention, _GONE)))

    def note_weights(self) -> None:
        """The weights are those to be generated from."""
        self._stamp, self._places = self._weights.stamp(), self._weights.places()

    def ignore_changes(self) -> None:
        """Ignore what has changed since it was noted: the model changes that itself."""
        changed = {(id(own), name) for own, name, value in self._switches if _differs(own, name, value)}
        for module in self._model.modules():
            self._changing |= {(type(module), name) for own, name in changed if own == id(vars(module))}

    def weights_written(self) -> bool:
        """Return whether the weights are other ones, or were."""
        return self._stamp != self._weights.stamp()

    def switched(self) -> str:
        """Return what is switched otherwise than it was noted; empty: nothing."""
        changed = [(own, name, value) for own, name, value in self._switches if _differs(own, name, value)]
        if not changed:
            return ""
        own, name, value = changed[0]
        where = next((n for n, m in self._model.named_modules() if vars(m) is own), "its configuration")
        more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
        if name in (*_TABLES, "forward"):
            return f"{name} of {where or 'the model'} has changed{more}"
        return f"{name} of {where or 'the model'} is {own.get(name)!r}, it was {value!r}{more}"

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch one tick in this thread: afterwards :meth:`torn` says what has changed in it."""
        self._torn, self._decoder = "", threading.get_ident()
        hooks = self._called_each_time()._forward_pre_hooks
        hooks[_OURS] = self._hook  # under one name, so that the table is the same in every tick
        try:
            yield
        finally:
            del hooks[_OURS]

    def torn(self) -> str:
        """Return what has changed during the last tick, or since it was noted; empty: nothing."""
        return self._torn or self.switched()

    def torn_error(self, name: str, torn: str, requests: int, unsound: int) -> WeightsInUse:
        """Return what engine ``name`` says of a tick in which ``torn`` has changed, or the weights have."""
        switched = torn not in ("", WRITTEN)
        return WeightsInUse(
            f"{name}: {f'the model was switched ({torn})' if switched else 'the weights were written'} while "
            f"{requests} requests were generated from them: {unsound} tokens are of no known weights and were "
            f"dropped, all before them is kept; {HOLD_IT if switched else WHAT_TO_DO}"
        )

    async def as_noted(
        self, name: str, thread: Executor, generating: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Return when it is switched as it was noted, looking in ``thread``; WeightsInUse if it stays switched."""

        def look() -> str:
            with generating():
                return self.switched()

        loop = asyncio.get_running_loop()
        end = loop.time() + PATIENCE_S
        while switched := await loop.run_in_executor(thread, look):
            if loop.time() > end:
                raise WeightsInUse(f"{name}: the model was switched and is not as it was ({switched}); {HOLD_IT}")
            await asyncio.sleep(LOOK_AGAIN_S)

    def _look(self, *_: object) -> None:
        """The model is called, by whomever."""
        if not self._torn and (threading.get_ident() != self._decoder or self._glance()):
            self._torn = self.switched() or (WRITTEN if self.weights_written() else "")

    def _called_each_time(self) -> Any:
        compiled = hasattr(self._model, "_orig_mod") or getattr(self._model, "_compiled_call_impl", None) is not None
        return self._model if compiled else self._model.get_input_embeddings()

    def _glance(self) -> bool:
        """Return whether one of those looked at before this step has changed."""
        self._steps += 1
        switches, places = _part(self._switches, self._steps), _part(self._places, self._steps)
        return any(_differs(own, name, value) for own, name, value in switches) or any(
            tensor.data_ptr() != place for tensor, place in places
        )


def _embeddings(model: Any) -> Iterator[int]:
    """The modules that take the input of the model, or of a part of it, such as a vision tower."""
    for module in model.modules():
        with suppress(AttributeError, NotImplementedError):
            yield id(module.get_input_embeddings())


def _part(of: list[T], number: int) -> list[T]:
    size = max(GLANCE, -(-len(of) // 32))
    parts = -(-len(of) // size) or 1
    return of[number % parts * size :][:size]


def _differs(own: dict[str, Any], name: str, value: Any) -> bool:
    try:
        return bool(own.get(name, _GONE) != value)
    except RuntimeError:  # other tensors, which are compared value by value
        return True


def _switch(name: str, value: Any) -> Any:
    """A copy of what decides something, ``_NONE`` for all else: numbers that count, tensors."""
    if name in _TABLES:
        return value.copy()
    if name == "forward" or value is None or isinstance(value, bool | str | float):
        return value
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    if not isinstance(value, dict | list | tuple | set) or not all(isinstance(p, _PLAIN) for p in parts):
        return _NONE
    return value if isinstance(value, tuple) else value.copy()
