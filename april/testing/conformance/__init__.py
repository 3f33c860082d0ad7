"""The conformance suite: tests whether an engine, april's or a user's, keeps the promises of the engine protocol.

    report = await conformance.run(conformance.Subject(open=my_engine))
    assert not report.failed, report.failed

``docs/engines.md`` lists the promises and how april's engines keep them. Needs no test runner.
"""

from april.testing.conformance.bench import Check
from april.testing.conformance.reference import hugging_face
from april.testing.conformance.run import CHECKS, check_named, run
from april.testing.conformance.subject import (
    Broken,
    Outcome,
    Reference,
    Report,
    Shown,
    Subject,
    Verdict,
    Weights,
)

__all__ = [
    "CHECKS",
    "Broken",
    "Check",
    "Outcome",
    "Reference",
    "Report",
    "Shown",
    "Subject",
    "Verdict",
    "Weights",
    "check_named",
    "hugging_face",
    "run",
]
