"""What users and april itself test with: a virtual clock, fake engines, fault scripts, an audit from outside.

``docs/testing.md`` shows a whole test. Needs neither torch nor any test runner; names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from april.testing.auditing import Audit, AuditError, audit
    from april.testing.fake_engine import FakeEngine
    from april.testing.fake_tokens import conversation, fake_logprobs, fake_response
    from april.testing.fault_script import ALL_FAULTS, STREAM_FAULTS, Fault, FaultKind, FaultScript, Fired
    from april.testing.recording_proxy import RecordingProxy
    from april.testing.records import AbortRecord, AttemptRecord
    from april.testing.same_loop import Rollouts, rollouts
    from april.testing.virtual_clock import VirtualClockLoop, VirtualDeadlock, run_virtual

_HOMES = {
    "april.testing.auditing": ("Audit", "AuditError", "audit"),
    "april.testing.fake_engine": ("FakeEngine",),
    "april.testing.fake_tokens": ("conversation", "fake_logprobs", "fake_response"),
    "april.testing.fault_script": ("ALL_FAULTS", "STREAM_FAULTS", "Fault", "FaultKind", "FaultScript", "Fired"),
    "april.testing.recording_proxy": ("RecordingProxy",),
    "april.testing.records": ("AbortRecord", "AttemptRecord"),
    "april.testing.same_loop": ("Rollouts", "rollouts"),
    "april.testing.virtual_clock": ("VirtualClockLoop", "VirtualDeadlock", "run_virtual"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ALL_FAULTS",
    "STREAM_FAULTS",
    "AbortRecord",
    "AttemptRecord",
    "Audit",
    "AuditError",
    "FakeEngine",
    "Fault",
    "FaultKind",
    "FaultScript",
    "Fired",
    "RecordingProxy",
    "Rollouts",
    "VirtualClockLoop",
    "VirtualDeadlock",
    "audit",
    "conversation",
    "fake_logprobs",
    "fake_response",
    "rollouts",
    "run_virtual",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'april.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
