"""Random lives of the core, with every book checked after every event by two independent accountants."""

from __future__ import annotations

import random
from collections import Counter

from core_machine import EOS, OLD_TIMER, CoreMachine, settings
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from april.core import commands as do
from april.core import events as ev
from april.core.settings import EngineLimits
from april.core.types import (
    AttemptFailure,
    EngineFinish,
    FinishReason,
    OnStale,
    Refill,
    SampleId,
    SampleState,
    Timer,
    TimerKind,
)

ENGINES = (EngineLimits("a", 400, 5, (EOS,)), EngineLimits("b", 500, None, (EOS,)), EngineLimits("c", 450, 3, (EOS,)))


class Life(CoreMachine):
    """Adds what can go wrong to the machine; every choice comes from one seeded stream."""

    def __init__(self, rng: random.Random, prompts: int | None) -> None:
        self.rng = rng
        table: dict[tuple[int, int], int] = {}
        n, samples = rng.randint(1, 4), rng.randint(1, 4)
        over = rng.randint(1, 3 * n)
        bound = max(rng.randint(0, 4), -(-over // n) - 1)
        super().__init__(
            settings(
                n=n, samples=samples, over=over, refill=rng.choice(list(Refill)), max_in_flight=rng.randint(1, 12),
                max_staleness=bound, on_stale=rng.choice(list(OnStale)), max_response_len=rng.choice([30, 1000]),
                group_reward=rng.random() < 0.3, max_attempt_failures=rng.randint(1, 3), max_failed_groups=50,
                max_held_tokens=rng.choice([None, None, 200]), retry_pause_s=rng.choice([0.0, 4.0]),
            ),
            lambda g, i: table.setdefault((g, i), rng.choice([1, 2, 3, 8, 40, 200])),
            prompts,
            ENGINES[: rng.randint(1, 3)],
            auto_score=rng.random() < 0.5,
        )  # fmt: skip
        self.rejected = 0
        self.stopped: set[SampleId] = set()
        """Samples that completed a stop string (and may have begun again since)."""

        self.pauses: list[Timer] = []
        """Timers after which a reward is asked for again."""

    def _execute(self, command: do.Command) -> None:
        super()._execute(command)
        if isinstance(command, do.StartTimer) and command.timer.kind is TimerKind.RETRY:
            self.pauses.append(command.timer)

    def one_event(self) -> None:
        """Something happens."""
        if self.core.step is None and self.rng.random() < 0.5:
            if not self.ended:
                self.post(ev.StepRequested())
            return
        happening = self.rng.choices(
            [
                "tokens", "end", "stop", "fail", "corrupt", "late", "score", "timer", "reward_fails", "update", "pause",
                "probe",
            ],
            [30, 30, 6, 3, 1, 2, 12, 3, 1, 4, 1, 4],
        )[0]  # fmt: skip
        getattr(self, f"_{happening}")()

    def _some_attempt(self) -> str | None:
        return self.rng.choice(sorted(self.in_flight)) if self.in_flight else None

    def _tokens(self) -> None:
        attempt_id = self._some_attempt()
        if attempt_id and self.tokens(attempt_id, self.rng.randint(0, 9)):
            self.end(attempt_id, 0)

    def _end(self) -> None:
        attempt_id = self._some_attempt()
        if attempt_id:
            self.end(attempt_id, 0 if attempt_id in self.abort_asked else 10**6)

    def _stop(self) -> None:
        """An attempt completes a stop string; its engine has made a few tokens more, and may go on."""
        attempt_id = self._some_attempt()
        if attempt_id is None or self.in_flight[attempt_id].tape.stopped:
            return
        complete = self.tokens(attempt_id, 3)
        tape = self.in_flight[attempt_id].tape
        if tape.count == 0:
            return
        tape.stopped = True
        self.stopped.add(self.in_flight[attempt_id].sample.id)
        if complete:
            self.end(attempt_id, 0)
        else:
            self.tokens(attempt_id, self.rng.randint(0, 4))
            self.post(ev.StopFound(attempt_id))

    def _fail(self, corrupt: bool = False) -> None:
        attempt_id = self._some_attempt()
        if attempt_id:
            self.tokens(attempt_id, 3)
            attempt = self.in_flight.pop(attempt_id)
            self.abort_asked.discard(attempt_id)
            rejected = self.rng.randint(0, 4) if corrupt else 0
            self.rejected += rejected
            kind = AttemptFailure.CORRUPT if corrupt else AttemptFailure.BROKE_OFF
            self.post(ev.AttemptFailed.of(attempt, "broken", kind, rejected=rejected))

    def _corrupt(self) -> None:
        self._fail(corrupt=True)

    def _late(self) -> None:
        self.post(ev.AttemptEnded(f"{self.rng.getrandbits(64):032x}", EngineFinish.STOP))
        self.post(ev.Scored(self.rng.randint(0, 30), []))

    def _score(self) -> None:
        waiting = [s for s in self.to_score if s[0] in self.core.buffer.groups]
        self.to_score = waiting
        if waiting:
            sample = waiting.pop(self.rng.randrange(len(waiting)))
            self.score(sample)
            self.post(OLD_TIMER)

    def _reward_fails(self) -> None:
        waiting = [s for s in self.core.buffer.samples() if s.state is SampleState.SCORING]
        if waiting:
            self.post(ev.SampleFailed(SampleId(*self.rng.choice(waiting).id), "reward raised"))

    def _timer(self) -> None:
        self.post(ev.TimerFired(Timer(TimerKind.ABORTS, self.rng.randint(0, 40))))

    def _update(self) -> None:
        if not self.in_flight:
            self.update()

    def _pause(self) -> None:
        self.post(ev.PauseRequested() if not self.core.paused else ev.Resumed())

    def _probe(self) -> None:
        if self.pauses:
            self.post(ev.TimerFired(self.pauses.pop(self.rng.randrange(len(self.pauses)))))
        for name, state in self.core.engines.states.items():
            if state.quarantined:
                self.post(ev.EngineReady(name))

    def audit(self) -> None:
        """Tokens and prompts against counts kept outside the core."""
        t, p = self.core.tokens, self.core.prompts
        assert self.core.observed_tokens() == self.generated + self.rejected
        delivered = sum(int(b.metrics["trained_tokens"]) for b in self.batches)
        assert t.delivered == delivered
        held = sum(s.tape.generated for s in self.core.buffer.samples())
        assert t.observed == delivered + held + sum(t.dropped.values())
        groups = [s.id.group for b in self.batches for s in b.samples if s.id.index == 0]
        assert all(count == 1 for count in Counter(groups).values())
        assert p.observed == len(groups) + len(self.core.buffer) + sum(p.dropped.values())
        for batch in self.batches:
            for s in batch.samples:
                assert s.tokens[:-1].tolist() == list(range(10, 9 + len(s.tokens)))
                if s.finish is FinishReason.STOP and s.tokens[-1] != EOS:
                    assert s.id in self.stopped


@hypothesis_settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32), prompts=st.sampled_from([None, 5, 40]))
def test_books_balance_through_any_life(seed: int, prompts: int | None) -> None:
    """Every token is delivered, held or dropped by name; every prompt is settled once; tokens arrive unaltered."""
    life = Life(random.Random(seed), prompts)
    for _ in range(250):
        life.one_event()
    life.audit()


@hypothesis_settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_every_prompt_is_settled_once_troubles_end(seed: int) -> None:
    """Liveness: once failures stop, a finite source is settled to the last prompt."""
    life = Life(random.Random(seed), 12)
    for _ in range(120):
        life.one_event()
    if life.core.paused:
        life.post(ev.Resumed())
    for _ in range(20_000):
        if life.ended:
            break
        life._probe()
        life._score()
        if life.core.step is None or life.core.train_first:
            life.update()
        if life.core.step is None:
            life.post(ev.StepRequested())
        life._end()
    life.audit()

    assert life.ended, repr(life.core)
    p = life.core.prompts
    assert p.held == 0
    assert p.observed == 12 == p.delivered + sum(p.dropped.values())
