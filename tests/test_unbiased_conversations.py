"""The loss of samples with one to five conversations has the exact gradient, in a toy of which every outcome is played.

The policy writes ``Y`` or EOS, with a chance for each kind of conversation: the first one, a sub-agent's, and one that
quotes others. What its agent asks next depends on what was written, and so does the reward. All groups of outcomes are
played through the core, with their calls cut, lost, asked again and unheard; each group counts with its probability,
so the mean of the losses' gradients is no estimate.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from chain_machine import ChainMachine, Key, P
from core_machine import EOS, settings
from numpy.typing import NDArray

from april.core import commands as do
from april.core import events as ev
from april.core.batch import Batch
from april.core.types import AttemptFailure, EngineFinish, SampleId
from april.corrections.advantages import Method
from april.corrections.loss_weights import loss_weights

Y, SUB, QUOTES, EDITED = 10, 90, 91, 92
CHANCES = np.array([0.6, 0.3, 0.45])
"""Of Y, by kind of conversation."""
LONGEST = 40

Question = tuple[list[int], int]
"""A conversation, and the most tokens of its continuation."""
Agent = Generator[list[Question], list[list[int]], None]


def kind_of(ids: Sequence[int]) -> int:
    """The parameter by which the next token is drawn."""
    return 1 if ids[0] == SUB else 2 if ids[0] == QUOTES or EDITED in ids else 0


def score(ids: Sequence[int], token: int) -> NDArray[np.float64]:
    """Gradient of the token's log-probability by the logits of Y."""
    found = np.zeros(3)
    found[kind_of(ids)] = (token == Y) - CHANCES[kind_of(ids)]
    return found


def agent() -> Agent:
    """Tools, a sub-agent, equal twins, a summary instead of the history, and a history that was edited: 1 to 5 rows."""
    (main,) = yield [(P, 4)]
    written = main.count(Y)
    if written == 0:
        yield [([*P, *main, 7], 1)]
        return
    answers = yield [([SUB], 1)] * min(written, 2)
    if written >= 3:
        yield [([QUOTES, *P, *main, *itertools.chain(*answers)], 1)]
    if written == 4:
        yield [([*P, Y, Y, EDITED], 1)]


def short_agent() -> Agent:
    """One or two rows, for groups of four."""
    (main,) = yield [(P, 1)]
    if main == [Y]:
        yield [([SUB], 1)]


@dataclass(frozen=True)
class Outcome:
    """Of an agent: its calls with their answers, in order."""

    calls: tuple[tuple[list[int], list[int]], ...]
    rows: int
    chance: float
    score: NDArray[np.float64]
    reward: float

    @property
    def length(self) -> int:
        return sum(len(answer) for _, answer in self.calls)


def outcomes(agents: Callable[[], Agent]) -> list[Outcome]:
    found: list[Outcome] = []
    beginnings: list[list[int]] = [[]]
    while beginnings:
        choices = beginnings.pop()
        played = _played(agents(), choices)
        if played is None:
            beginnings += [[*choices, EOS], [*choices, Y]]
            continue
        steps = [([*ids, *answer[:i]], t) for ids, answer in played for i, t in enumerate(answer)]
        chances = [CHANCES[kind_of(ids)] if t == Y else 1 - CHANCES[kind_of(ids)] for ids, t in steps]
        rows = len(played) - sum(7 in ids for ids, _ in played)
        found.append(
            Outcome(
                tuple(played), rows, float(np.prod(chances)), np.sum([score(*step) for step in steps], axis=0),
                float((3 * sum((i + 1) * (t == Y) for i, (_, t) in enumerate(steps)) + rows) % 5),
            )
        )  # fmt: skip
    return found


def _played(agent: Agent, choices: Sequence[int]) -> list[tuple[list[int], list[int]]] | None:
    """The calls, if there are as many choices as the agent has tokens; None if more are needed."""
    left, calls = list(choices), []
    questions = next(agent)
    while True:
        answers: list[list[int]] = []
        for ids, most in questions:
            answer: list[int] = []
            while len(answer) < most and answer[-1:] != [EOS]:
                if not left:
                    return None
                answer.append(left.pop(0))
            answers.append(answer)
            calls.append((ids, answer))
        try:
            questions = agent.send(answers)
        except StopIteration:
            assert not left
            return calls


class Player(ChainMachine):
    """Plays outcomes: ``groups`` are those of the samples of each group."""

    def __init__(self, agents: Callable[[], Agent], groups: Sequence[Sequence[Outcome]], **changes: Any) -> None:
        self.agents, self.plan = agents, groups
        changes = {"n": 1, "samples": len(groups[0]), "max_response_len": LONGEST, "max_failed_groups": 99} | changes
        super().__init__(settings(**changes), None, prompts=len(groups))
        self.core._check = False  # random lives do

    def _execute(self, command: do.Command) -> None:
        if isinstance(command, do.ScoreGroup):
            rewards = [(s.id.index, self.reward_of(s.id)) for s in command.group.samples]
            self._pump.post(ev.Scored(command.group.id, rewards))
            return
        super()._execute(command)

    def reward_of(self, sample: tuple[int, int]) -> float:
        return self.plan[sample[0]][sample[1]].reward

    def score(self, sample_id: Any) -> None:
        self.post(ev.Scored(sample_id[0], [(sample_id[1], self.reward_of(sample_id))]))

    def play(self, of: Key, trouble: int) -> None:
        """The function of a sample, from its start to its return; 0 is no ``trouble``."""
        outcome = self.plan[of[0]][of[1]]
        agent, answers, said = self.agents(), outcome.calls, 0
        questions = next(agent)
        while True:
            numbers = [self.call(ids, of, max_tokens=most) for ids, most in questions]
            if trouble == 3:
                self.nobody_hears(of)
            told = answers[said : said + len(questions)]
            said += len(questions)
            for number, (_, answer) in sorted(zip(numbers, told, strict=True), reverse=bool(of[0] % 2)):
                if (of, number) not in self.heard:
                    self.answer(of, number, answer, cut=trouble == 1)
            if trouble == 2:
                self.lose(of[0])
                agent, said, trouble = self.agents(), 0, 0
                questions = next(agent)
                continue
            try:
                questions = agent.send([self.heard[of, number].tokens for number in numbers])
            except StopIteration:
                self.returns(of)
                return

    def answer(self, of: Key, number: int, tokens: Sequence[int], *, cut: bool) -> None:
        """What the policy writes, in one go or two."""
        if cut and len(tokens) > 1:
            attempt = self.of_call(number, of)
            self._came(attempt, tokens[0])
            self.fail(attempt, kind=AttemptFailure.NO_TEXT)
            tokens = tokens[1:]
        attempt = self.of_call(number, of)
        for token in tokens:
            self._came(attempt, token)
        del self.in_flight[attempt.id]
        finish = EngineFinish.STOP if tokens[-1] == EOS else EngineFinish.LENGTH
        self.post(ev.AttemptEnded.of(attempt, finish))

    def nobody_hears(self, of: Key) -> None:
        """A client that leaves, before the answer or after it; what the policy wrote for it is not trained."""
        number = self.call([SUB, 3], of, max_tokens=1)
        if of[1] % 2:
            self.answer(of, number, [Y], cut=False)
        else:
            attempt = self.of_call(number, of)
            self.unheard(number, of=of)
            self._came(attempt, Y)
            self.end(attempt.id, 0)
            return
        self.unheard(number, of=of)


def chance_of(group: Sequence[Outcome]) -> float:
    return float(np.prod([outcome.chance for outcome in group]))


Played = tuple[list[Batch], list[tuple[Outcome, ...]], list[float]]
"""Batches of one group each, the groups, and their probabilities."""


@cache
def pairs() -> Played:
    """Every two outcomes, in one order or the other."""
    groups = list(itertools.combinations_with_replacement(outcomes(agent), 2))
    return *played(agent, groups), [chance_of(group) * (2 - (group[0] is group[1])) for group in groups]


@cache
def scored_together() -> Played:
    """Every three outcomes of the short agent, whose rewards are those of a group."""
    groups = list(itertools.product(outcomes(short_agent), repeat=3))
    return *played(short_agent, groups, group_reward=True), [chance_of(group) for group in groups]


def played(agents: Callable[[], Agent], groups: Any, **changes: Any) -> tuple[list[Batch], Any]:
    """Each group as a batch of its own."""
    player = Player(agents, groups, max_in_flight=8, **changes)
    for number in range(len(groups)):
        player.ask() if number == 0 else player.next_step()
        for index in range(len(groups[0])):
            trouble = (number + index) % 4
            player.play((number, index), 0 if index and trouble == 2 else trouble)
        assert len(player.batches) == number + 1
    player.check_ledger()
    assert set(player.dropped) == {"unheard"}
    return player.batches, groups


def gradient_of(batch: Batch, method: Method, chance: Callable[[SampleId], float] = lambda sample: 1.0) -> Any:
    """Of the method's loss, as a trainer computes it from padded arrays."""
    arrays, advantages = batch.padded(), batch.advantages(method)
    mask = arrays["loss_mask"]
    weights = loss_weights(mask, method, samples=arrays["sample_numbers"], share=batch.share, max_response_len=LONGEST)
    found = np.zeros(3)
    for i, row in enumerate(batch.samples):
        scores = scores_of(tuple(row.prompt.token_ids.tolist()), tuple(row.tokens.tolist()))
        found += chance(row.id) * advantages[i] * (weights[i, : len(scores)] @ scores)
    return found


@cache
def scores_of(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> NDArray[np.float64]:
    """float [T, 3]: also of tokens without loss, which have no weight."""
    return np.array([score([*prompt, *tokens[:t]], token) for t, token in enumerate(tokens)]).reshape(-1, 3)


def mean_of(found: Played, method: Method, ranks: int = 1) -> Any:
    """The gradient's mean over all groups, summed over ranks."""
    parts = [
        chance * gradient_of(part, method)
        for batch, _, chance in zip(*found, strict=True)
        for part in (batch.split(ranks) if ranks > 1 else [batch])
    ]
    return np.sum(parts, axis=0)


def exact(agents: Callable[[], Agent]) -> Any:
    """The gradient of the mean reward."""
    return sum(o.chance * o.reward * o.score for o in outcomes(agents))


def test_the_toy_is_what_it_says() -> None:
    """Probabilities sum up to one, scores to zero, and samples have one to five rows."""
    every = outcomes(agent)
    assert sum(o.chance for o in every) == pytest.approx(1.0)
    np.testing.assert_allclose(sum(o.chance * o.score for o in every), 0.0, atol=1e-12)
    assert {o.rows for o in every} == {1, 2, 3, 4, 5}
    assert np.abs(exact(agent)).min() > 0.01


@pytest.mark.parametrize("found", [pairs, scored_together])
def test_every_token_is_in_one_row_with_the_reward_of_its_sample(found: Callable[[], Played]) -> None:
    """Rows are those of the outcome, whatever had happened on the way; what is quoted carries no loss."""
    for batch, group, _ in zip(*found(), strict=True):
        for index, outcome in enumerate(group):
            rows = [row for row in batch.samples if row.id.index == index]
            assert len(rows) == outcome.rows
            assert {row.reward for row in rows} == {outcome.reward}
            assert sum(int(row.loss_mask.sum()) for row in rows) == outcome.length
            asked = sorted([*ids, *answer] for ids, answer in outcome.calls)
            whole = sorted([*row.prompt.token_ids.tolist(), *row.tokens.tolist()] for row in rows)
            assert whole == (asked[1:] if len(asked) > outcome.rows else asked)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_gradient_is_exact(ranks: int) -> None:
    """rloo's is that of the mean reward, dr_grpo's the same up to its factors; over ranks as on one."""
    np.testing.assert_allclose(mean_of(pairs(), "rloo", ranks), exact(agent), rtol=1e-5)
    np.testing.assert_allclose(mean_of(pairs(), "dr_grpo", ranks), exact(agent) / (2 * LONGEST), rtol=1e-5)
    np.testing.assert_allclose(mean_of(scored_together(), "rloo", ranks), exact(short_agent), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("method", ["grpo", "dapo", "gspo"])
def test_methods_that_bend_it_bend_it_as_with_one_row_each(method: Method) -> None:
    """A sample of several rows weighs what one response of the same tokens would."""
    expected = np.zeros(3)
    for _, group, chance in zip(*pairs(), strict=True):
        rewards = np.array([o.reward for o in group])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        lengths = np.array([o.length for o in group])
        weights = np.full(2, 1 / lengths.sum()) if method == "dapo" else 1 / (2 * lengths)
        expected += chance * np.sum((advantages * weights)[:, None] * [o.score for o in group], axis=0)
    np.testing.assert_allclose(mean_of(pairs(), method), expected, rtol=1e-5)


def test_an_evaluation_has_the_mean_reward() -> None:
    """Each outcome once: rewards are of whole samples, all their rows are there, and none is trained."""
    every = [(outcome,) for outcome in outcomes(agent)]
    player = Player(agent, every, max_in_flight=64)
    player.evaluate(len(every))
    started = [c.sample for c in player.commands if isinstance(c, do.StartSample)]
    plan = {sample.id.group: outcome for sample, outcome in zip(started, every, strict=True)}
    player.plan = plan  # type: ignore[assignment]
    for sample in started:
        player.play(tuple(sample.id), 3 * (sample.key.group % 2))
    (done,) = [c for c in player.commands if isinstance(c, do.EvaluationDone)]
    found = 0.0
    for group in done.groups:
        (outcome,) = plan[group.id]
        (sample,) = group.samples
        assert len(sample.chains) == outcome.rows
        found += outcome.chance * sample.reward
    assert found == pytest.approx(sum(o.chance * o.reward for (o,) in every))
    assert player.core.tokens.observed == 0


def test_a_quorum_and_over_sampling_do_not_bend_it() -> None:
    """Stragglers with more rows come in later batches, among samples of other groups; each has its own first others."""
    groups = list(itertools.product(outcomes(short_agent), repeat=4))
    np.random.default_rng(3).shuffle(groups)  # type: ignore[arg-type]
    player = Player(short_agent, groups, over=2, group_quorum=0.75, max_in_flight=32, max_staleness=4)
    player.ask()
    while not player.ended:
        if player.core.batch_wanted:  # who has asked less is done first, of whatever group
            player.play(min(player.alive, key=lambda of: (groups[of[0]][of[1]].rows, of)), 1)
        else:
            player.next_step()
    rows = [row for batch in player.batches for row in batch.samples]
    assert len({row.id for row in rows}) == 4 * len(groups)
    assert sum(len({row.id.group for row in batch.samples}) > 1 for batch in player.batches) >= 5
    chances = [chance_of(group) for group in groups]
    found = [gradient_of(b, "rloo", lambda sample: chances[sample.group]) for b in player.batches]
    assert {batch.share.samples for batch in player.batches} == {4}
    np.testing.assert_allclose(np.sum(found, axis=0), exact(short_agent), rtol=1e-5, atol=1e-9)
