"""Test tools for users and for april itself: a virtual clock, fake engines, fault scripts, an independent audit.

``docs/testing.md`` shows a whole test. Needs neither torch nor any test runner.
"""

from april.testing.auditing import Audit, AuditError, audit
from april.testing.fake_engine import FakeEngine
from april.testing.fault_script import ALL_FAULTS, STREAM_FAULTS, Fault, FaultKind, FaultScript, Fired
from april.testing.records import AbortRecord, AttemptRecord, conversation, fake_logprobs, fake_response
from april.testing.same_loop import Rollouts, rollouts
from april.testing.virtual_clock import VirtualClockLoop, VirtualDeadlock, run_virtual

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
