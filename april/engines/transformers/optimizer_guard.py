"""Optimizer steps on a model that is generating at this moment are refused before they write anything."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

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
