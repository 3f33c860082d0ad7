"""april: active partial rollouts for LLM reinforcement learning (arXiv 2509.18521).

``import april`` imports neither torch nor a trainer or engine; each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from april.version import __version__ as __version__

if TYPE_CHECKING:
    from april.concurrency.model_lock import hold_model
    from april.config.flags import add_april_arguments, config_from_arguments
    from april.config.settings import Config, SamplingConfig
    from april.core.batch import Batch, DeliveredSample
    from april.core.engine_limits import Limit, LimitCode
    from april.core.ledger import Ledger
    from april.core.sampling import SamplingParams
    from april.core.tape import Segment, SegmentKind
    from april.core.types import DropReason, FinishReason, Prompt, SampleId
    from april.core.versions import PolicyVersion
    from april.corrections.advantages import group_advantages
    from april.corrections.importance import masked_weights, truncated_weights
    from april.corrections.loss_weights import loss_weights
    from april.corrections.off_policy import DriftGuard, off_policy_report
    from april.corrections.policy_loss import policy_loss
    from april.driver.llm import LLM, BlockingLLM, Completion
    from april.driver.rewards import EvaluationResult, Response, Reward, rewards_differ
    from april.engines.attachments import attachment_bytes
    from april.engines.kinds.serving import serve_forever
    from april.engines.protocol import Capabilities, Chunk, Engine, EngineFinish, Health, LogprobKind, Request
    from april.engines.served.server import EngineServer, serve
    from april.engines.transformers.engine import TransformersEngine
    from april.engines.vllm.in_process import VllmInProcessEngine
    from april.errors import (
        AprilError,
        CheckpointError,
        ConfigError,
        DataExhausted,
        EngineError,
        InvariantError,
        OffPolicyError,
        RankError,
        RolloutError,
        SchedulerClosed,
        UsageError,
        WeightsInUse,
        WireError,
    )
    from april.processes.addresses import new_token
    from april.processes.rank_scheduler import RankScheduler
    from april.processes.ranks import Ranks
    from april.record.file import RunRecord
    from april.scheduler import RolloutScheduler
    from april.serialization.torch_arrays import to_torch

_HOMES = {
    "april.engines.attachments": ("attachment_bytes",),
    "april.config.flags": ("add_april_arguments", "config_from_arguments"),
    "april.config": ("Config", "SamplingConfig"),
    "april.core.batch": ("Batch", "DeliveredSample"),
    "april.core.ledger": ("Ledger",),
    "april.core.sampling": ("SamplingParams",),
    "april.core.tape": ("Segment", "SegmentKind"),
    "april.core.types": ("DropReason", "FinishReason", "Prompt", "SampleId"),
    "april.core.versions": ("PolicyVersion",),
    "april.corrections.advantages": ("group_advantages",),
    "april.corrections.loss_weights": ("loss_weights",),
    "april.corrections.importance": ("masked_weights", "truncated_weights"),
    "april.corrections.off_policy": ("DriftGuard", "off_policy_report"),
    "april.corrections.policy_loss": ("policy_loss",),
    "april.driver.llm": ("LLM", "BlockingLLM", "Completion"),
    "april.driver.rewards": ("EvaluationResult", "Response", "Reward", "rewards_differ"),
    "april.core.engine_limits": ("Limit", "LimitCode"),
    "april.concurrency.model_lock": ("hold_model",),
    "april.engines.protocol": ("Capabilities", "Chunk", "Engine", "EngineFinish", "Health", "LogprobKind", "Request"),
    "april.engines.kinds.serving": ("serve_forever",),
    "april.engines.served.server": ("EngineServer", "serve"),
    "april.engines.transformers.engine": ("TransformersEngine",),
    "april.engines.vllm.in_process": ("VllmInProcessEngine",),
    "april.errors": (
        "AprilError", "CheckpointError", "ConfigError", "DataExhausted", "EngineError", "InvariantError",
        "OffPolicyError", "RankError", "RolloutError", "SchedulerClosed", "UsageError", "WeightsInUse", "WireError",
    ),
    "april.processes.addresses": ("new_token",),
    "april.processes.ranks": ("Ranks",),
    "april.processes.rank_scheduler": ("RankScheduler",),
    "april.record.file": ("RunRecord",),
    "april.scheduler": ("RolloutScheduler",),
    "april.serialization.torch_arrays": ("to_torch",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "LLM", "AprilError", "Batch", "BlockingLLM", "Capabilities", "CheckpointError", "Chunk", "Completion", "Config",
    "ConfigError", "DataExhausted", "DeliveredSample", "DriftGuard", "DropReason", "Engine", "EngineError",
    "EngineFinish", "EngineServer", "EvaluationResult", "FinishReason", "Health",
    "InvariantError", "Ledger", "Limit", "LimitCode", "LogprobKind", "OffPolicyError", "PolicyVersion", "Prompt",
    "RankError", "RankScheduler", "Ranks", "Request", "Response", "Reward", "RolloutError", "RolloutScheduler",
    "RunRecord", "SampleId", "SamplingConfig", "SamplingParams", "SchedulerClosed", "Segment", "SegmentKind",
    "TransformersEngine", "UsageError", "VllmInProcessEngine", "WeightsInUse", "WireError", "add_april_arguments",
    "attachment_bytes", "config_from_arguments", "group_advantages", "hold_model", "loss_weights", "masked_weights",
    "new_token", "off_policy_report", "policy_loss", "rewards_differ", "serve", "serve_forever",
    "to_torch", "truncated_weights",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'april' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
