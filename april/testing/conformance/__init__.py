"""The conformance suite: tests whether an engine, april's or a user's, keeps the promises of the engine protocol.

    report = await conformance.run(conformance.Subject(open=my_engine))
    assert not report.failed, report.failed

``docs/engines.md`` lists the promises and how april's engines keep them. Needs no test runner; the table of a report
needs the ``cli`` extra.
"""

from april.testing.conformance.bench import Check
from april.testing.conformance.run import CHECKS, check_named, run, semantics_matrix
from april.testing.conformance.servers import hugging_face, served
from april.testing.conformance.subject import (
    Answer,
    Outcome,
    Reference,
    Report,
    Shown,
    Subject,
    Verdict,
    Weights,
    Witness,
)

__all__ = [
    "CHECKS",
    "Answer",
    "Check",
    "Outcome",
    "Reference",
    "Report",
    "Shown",
    "Subject",
    "Verdict",
    "Weights",
    "Witness",
    "check_named",
    "hugging_face",
    "run",
    "semantics_matrix",
    "served",
]
