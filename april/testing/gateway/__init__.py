"""The conformance suite for gateways: twenty promises to agents that bring a client of their own, and to the trainer.

    report = await gateway.run(gateway.AprilSubject)
    assert not report.failed, report.failed

A :class:`Subject` is a gateway with the scripted model of :mod:`april.testing.gateway.script` behind it.
``docs/agents.md`` says how to bring one. Needs no client's SDK and no test runner.
"""

from april.testing.conformance.subject import Outcome, Report, Verdict
from april.testing.gateway.bench import Promise
from april.testing.gateway.of_april import AprilSubject
from april.testing.gateway.run import PROMISES, promise_named, run
from april.testing.gateway.subject import Attempt, Door, Ended, Row, Subject

__all__ = [
    "PROMISES",
    "AprilSubject",
    "Attempt",
    "Door",
    "Ended",
    "Outcome",
    "Promise",
    "Report",
    "Row",
    "Subject",
    "Verdict",
    "promise_named",
    "run",
]
