"""Detects whether other code has changed the model's settings or weights while tokens were sampled.

The weights and the settings of every module are watched. Settings are flags, floats, strings and collections of them
(adapters, their scales, training mode), hooks, submodules and parameters. The state is compared after each tick (a few
decode steps of the engine), and whenever another thread calls the model during a tick, because other code may change
settings only for the duration of a call.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

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
    "the embedded engine reads the trainer's model in place, so rewards, rollout functions and threads must switch it "
    "only inside `with april.hold_model(model):`, and switch it back there; weight_update() clears this error"
)


def guard_optimizers(engine: Any, weights: Any) -> weakref.finalize[Any, Any]:
    """Make ``step()`` of optimizers of these weights raise WeightsInUse while ``engine.generating`` is True.

    Steps are refused before they begin. PyTorch's counters of writes to a tensor would show a step too late (after a
    fused step, which is one long write) or never. Calling the result, or deleting ``engine``, removes the guard.
    """
    engine_ref, weights_ref = weakref.ref(engine), weakref.ref(weights)

    def before_step(optimizer: Optimizer, *_: object) -> None:
        generating, trained = engine_ref(), weights_ref()
        if generating is None or trained is None or not generating.generating:
            return
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if any(id(parameter) in held for parameter in trained.trained_parameters()):
            raise WeightsInUse(
                f"april refused an optimizer step while {generating.name} generates from the same weights, and no "
                f"weight was changed: {WHAT_TO_DO}"
            )

    handle = register_optimizer_step_pre_hook(before_step)
    return weakref.finalize(engine, handle.remove)


PATIENCE_S, POLL_S = 10.0, 0.01
"""Seconds to wait for other code to restore the model, and seconds between two checks during that time."""
WRITTEN = "its weights were changed"
_ABSENT, _NO_SETTING, _OURS = object(), object(), object()
_PLAIN = (bool, str, int, float, type(None))
_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_modules", "_parameters")


class ModelState:
    """Detects changes of a model; its settings are always read inside ``generation_mode`` of ``model_support``."""

    def __init__(self, model: Any, weights: ModelWeights) -> None:
        self._model, self._weights = model, weights
        self._settings: list[tuple[dict[str, Any], str, Any]] = []
        self._changing: set[tuple[type, str]] = set()
        """(Type of module, attribute) of settings that the model changes itself in its forward pass."""
        self._torn = ""
        """Change that was found while another thread called the model in the last tick; empty if there was none."""
        self._decoding_thread = 0
        self._hook = self._look  # stored, because each access to a method makes a new object, which would be a change
        self.note_weights()

    def note(self) -> None:
        """Record the present settings as the intended ones."""
        self._settings = []
        embeddings = set(_embeddings(self._model))
        for module in self._model.modules():
            own = vars(module)
            for name in {**own, "forward": None}:
                value = _copy_of_setting(name, own.get(name, _ABSENT))
                # transformers adds a hook to embeddings and removes it again, for gradients of frozen models
                if name == "_forward_hooks" and id(module) in embeddings:
                    continue
                if value is not _NO_SETTING and (type(module), name) not in self._changing:
                    self._settings.append((own, name, value))
        config = vars(self._model.config)
        attention = "_attn_implementation_internal"
        self._settings.append((config, attention, config.get(attention, _ABSENT)))

    def note_weights(self) -> None:
        """Record the present weights as the intended ones."""
        self._stamp = self._weights.stamp()

    def ignore_changes(self) -> None:
        """Stop watching settings that have changed since they were recorded: the model changes them itself."""
        changed = {(id(own), name) for own, name, value in self._settings if _differs(own, name, value)}
        for module in self._model.modules():
            self._changing |= {(type(module), name) for own, name in changed if own == id(vars(module))}

    def weights_written(self) -> bool:
        """Return True if the weights were written or replaced since they were recorded."""
        return self._stamp != self._weights.stamp()

    def changed_setting(self) -> str:
        """Describe a setting that differs from the recorded one; empty if none does."""
        changed = [(own, name, value) for own, name, value in self._settings if _differs(own, name, value)]
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
        """Watch one tick in this thread; afterwards :meth:`changes_in_tick` describes what has changed."""
        self._torn, self._decoding_thread = "", threading.get_ident()
        hooks = self._hooked_module()._forward_pre_hooks
        hooks[_OURS] = self._hook  # always the same key and value, because the hooks are part of the recorded state
        try:
            yield
        finally:
            del hooks[_OURS]

    def changes_in_tick(self) -> str:
        """Describe what changed during the last tick or since the recording; empty if nothing did."""
        return self._torn or self.changed_setting()

    def changed_error(self, name: str, changed: str, requests: int, dropped: int) -> WeightsInUse:
        """Build the error for the change that ``changed`` describes; "" and WRITTEN mean that the weights changed."""
        switched = changed not in ("", WRITTEN)
        return WeightsInUse(
            f"{name}: {f'the model was switched ({changed})' if switched else 'the weights were changed'} while "
            f"{requests} requests generated from them: april dropped {dropped} tokens of unknown weights and kept all "
            f"before them; {HOLD_IT if switched else WHAT_TO_DO}"
        )

    async def wait_until_restored(
        self, name: str, thread: Executor, generating: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Wait until the settings are as recorded, checking in ``thread``; raises WeightsInUse if they stay changed."""

        def look() -> str:
            with generating():
                return self.changed_setting()

        loop = asyncio.get_running_loop()
        end = loop.time() + PATIENCE_S
        while switched := await loop.run_in_executor(thread, look):
            if loop.time() > end:
                raise WeightsInUse(f"{name}: the model was switched and not switched back ({switched}); {HOLD_IT}")
            await asyncio.sleep(POLL_S)

    def _look(self, *_: object) -> None:
        """Look for changes; this hook runs at each call of the model by any thread."""
        if not self._torn and threading.get_ident() != self._decoding_thread:
            self._torn = self.changed_setting() or (WRITTEN if self.weights_written() else "")

    def _hooked_module(self) -> Any:
        compiled = hasattr(self._model, "_orig_mod") or getattr(self._model, "_compiled_call_impl", None) is not None
        return self._model if compiled else self._model.get_input_embeddings()


def _embeddings(model: Any) -> Iterator[int]:
    """Yield the ids of modules that embed the input of the model, or of a part such as a vision tower."""
    for module in model.modules():
        with suppress(AttributeError, NotImplementedError):
            yield id(module.get_input_embeddings())


def _differs(own: dict[str, Any], name: str, value: Any) -> bool:
    try:
        return bool(own.get(name, _ABSENT) != value)
    except RuntimeError:  # a table with other tensors: comparing them gives no single truth value
        return True


def _copy_of_setting(name: str, value: Any) -> Any:
    """Return a copy of a setting, or ``_NO_SETTING`` for other attributes, such as counters and tensors."""
    if name in _TABLES:
        return value.copy()
    if name == "forward" or value is None or isinstance(value, bool | str | float):
        return value
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    if not isinstance(value, dict | list | tuple | set) or not all(isinstance(p, _PLAIN) for p in parts):
        return _NO_SETTING
    return value if isinstance(value, tuple) else value.copy()
