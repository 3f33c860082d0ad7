"""What a host says of one attempt, looked at as an engine's own answer is; what can be true goes onto the tape."""

from __future__ import annotations

import logging

import numpy as np

from april.core.engine_table import EngineTable
from april.core.tape import NO_LOGPROBS, NO_TOKENS, Int32
from april.core.types import Attempt, EngineFinish
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.driver.detokenizer import Detokenizer, completes_a_stop
from april.driver.wire_checks import AnswerChecks
from april.engines.protocol import Chunk
from april.errors import RolloutError, WireError
from april.processes import messages as wire
from april.processes.messages import ids_of, logprobs_of

log = logging.getLogger("april")


class AttemptReports:
    """See above. All methods raise EngineError for what cannot be true, and have changed nothing on the tape then.

    Args:
        table: what the engines have in common.
        max_context: of its engine.
        detokenizer: looks at the stop strings that the host has found; None: it is taken at its word.
    """

    __slots__ = ("_attempt", "_detokenizer", "checks")

    def __init__(
        self, attempt: Attempt, table: EngineTable, max_context: int, detokenizer: Detokenizer | None
    ) -> None:
        self._attempt, self._detokenizer = attempt, detokenizer
        self.checks = AnswerChecks(
            attempt, vocab_size=table.vocab_size, max_context=max_context, eos_token_ids=table.eos_token_ids,
            oldest=attempt.oldest,
        )  # fmt: skip

    def came(self, m: wire.Came, current: PolicyVersion) -> None:
        """Tokens."""
        tape = self._attempt.tape
        if m.at < tape.count:
            return  # told before
        tokens, logprobs = ids_of(m.tokens), logprobs_of(m.logprobs)
        whole = sum(count for _, count in m.spans) == len(tokens) == len(logprobs)
        if m.at > tape.count or not whole or (tape.stopped and len(tokens)):
            came = f"{len(tokens)} tokens, {len(logprobs)} log-probabilities, versions {m.spans}"
            raise WireError(f"{came}, from token {m.at} on, after {tape.count} tokens")
        at, chunks = 0, []
        for version, count in m.spans:
            if count < 1:
                raise WireError(f"versions {m.spans}")
            chunks.append(Chunk(tokens[at : at + count], logprobs[at : at + count], version))
            self.checks.piece(chunks[-1], current)
            at += count
        self._check_stop(m, tokens)
        for chunk in chunks:
            tape.append(chunk.tokens, chunk.logprobs, chunk.version)
        tape.stopped, tape.after_stop = m.stopped, m.after_stop

    def _check_stop(self, m: wire.Came, tokens: Int32) -> None:
        """A stop string is found once, where the text has it; what follows it has room."""
        attempt, tape = self._attempt, self._attempt.tape
        most, parsed = attempt.sampling.max_tokens, self.checks.count + m.after_stop
        if m.after_stop < tape.after_stop or (m.after_stop and not m.stopped) or (tape.stopped and not m.stopped):
            raise WireError(f"{m.after_stop} tokens after a stop string")
        if parsed > most:
            raise WireError(f"{parsed} tokens came where {most} were left of the budget")
        if not m.stopped or tape.stopped:
            return
        came = np.concatenate((tape.packed()[0], tokens))
        try:
            found = completes_a_stop(attempt, came, self._detokenizer)
        except RolloutError as error:  # the tokenizer here fails, and that of the host has not
            log.warning("attempt %s of %s: its stop string is taken for one: %s", attempt.id, attempt.sample.key, error)
            return
        if not found:
            raise WireError(f"the response has stopped at a stop string after {len(came)} tokens, where there is none")

    def ended(self, m: wire.Ended, *, fenced: bool) -> EngineFinish:
        """Its end. ``fenced``: the host was told to cut it off."""
        self._check_count(m.count)
        if m.fenced and not (fenced and m.finish is EngineFinish.ABORT):
            raise WireError(f"the response has ended ({m.finish}) as if it had been cut off here")
        return self.checks.end(_END[m.finish], matched=self._attempt.tape.stopped)

    def failed(self, m: wire.Failed) -> None:
        """That it broke off."""
        self._check_count(m.count)
        if m.rejected < 0 or not 0 <= m.busy_s < float("inf"):
            raise WireError(f"{m.rejected} tokens were rejected, and it is busy for {m.busy_s} s")

    def _check_count(self, count: int) -> None:
        """All that it has brought was reported before its end."""
        if count != self._attempt.tape.parsed:
            raise WireError(f"the response has ended with {count} tokens, and {self._attempt.tape.parsed} came")


_END = {finish: Chunk(NO_TOKENS, NO_LOGPROBS, FIRST_VERSION, finish) for finish in EngineFinish}
"""The last piece of an answer, of which only the finish is looked at."""
