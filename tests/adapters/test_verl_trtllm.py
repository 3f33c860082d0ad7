"""verl with TensorRT-LLM's server, which gives every request a budget of its own, whatever it was asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.stand_in_verl import Trainer
from april.processes.coordinator.calls import Session, generate
from april.processes.coordinator.messages import Done

Make = Callable[..., Trainer]
TRTLLM = {"actor_rollout_ref__rollout__name": "trtllm"}
LONG = 200
"""More than any budget: such a response ends by its length."""


@pytest.fixture
def trainer() -> Iterator[Make]:
    """A maker of trainers before such a server; they are closed at the end."""
    made: list[Trainer] = []

    def make(length_of: Callable[[int, int], int], **changes: Any) -> Trainer:
        made.append(Trainer(length_of, **(TRTLLM | changes)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def half_long(row: int, sample: int) -> int:
    """Every second prompt goes on to its limit."""
    return LONG if row % 2 else 5 + row % 3


def test_long_responses_are_cut_to_their_limit_and_none_is_lost(trainer: Make) -> None:
    """Tokens beyond the budget are dropped by name, and the response is complete: long prompts are trained as short
    ones are."""
    by_length: Counter[bool] = Counter()

    async def single_call(session: Session, prompt: list[int], send: Any) -> list[int]:
        done: Done = await generate(session, send, prompt, 40, 1.0)
        by_length[done.by_length] += prompt[1] % 2
        return done.tokens.tolist()

    run = trainer(half_long)
    run.agent_loop = single_call
    trained: dict[str, Any] = {}
    for _ in range(8):
        run.step()
        trained |= run.last
        run.update()
    books = run.ask("ledgers")
    assert books["prompts"]["dropped"] == {}
    assert sorted(Counter(run.trained).values()) == [1] * 8 * 3 * 2
    rows = sorted({row for row, _ in run.trained})
    assert len([row for row in rows if row % 2]) >= len(rows) // 2 - 2
    long = [t for t in trained.values() if len(t["tokens"]) > 7]
    assert any(response["resumes"] for response in long)
    for response in long:
        assert response["tokens"] == list(range(101, 141))
        assert response["spans"][-1][1] == 40
    assert set(by_length) >= {True}
    assert by_length[False] == 0
    assert set(books["tokens"]["dropped"]) == {"over_budget"}
    assert books["tokens"]["observed"] == run.server.generated


def test_a_late_response_is_cut_as_well(trainer: Make, tmp_path: Path) -> None:
    """One that came after its step, over a restart too: what it has beyond the budget is counted once."""
    run = trainer(half_long)
    run.delay_s = 3.0  # longer than a step waits
    for _ in range(4):
        run.step()
        run.update()
        run.validate(5.0)
    late = run.coordinator.host.mailboxes.late
    assert late
    generated, mine = run.server.generated, run.save(tmp_path)
    again = trainer(half_long)
    again.load(tmp_path, mine)
    for _ in range(8):
        again.step()
        again.update()
    books = again.ask("ledgers")
    assert books["prompts"]["dropped"] == {}
    assert books["tokens"]["dropped"]["over_budget"] > 0
    assert books["tokens"]["observed"] == generated + again.server.generated


def test_an_aborted_output_without_all_its_log_probabilities_costs_tokens_and_no_group(trainer: Make) -> None:
    """Its tokens are dropped by name, for nobody knows which number belongs to which; nothing else has failed."""
    run = trainer(lambda row, sample: 30 if row == 0 else 5, april__max_age=4)  # then a step waits for it
    run.server.cut_logprobs = 1
    for _ in range(8):
        run.step()
        run.update()
    books = run.ask("ledgers")
    assert books["prompts"]["dropped"] == {}
    assert 0 in {row for row, _ in run.trained}
    assert books["tokens"]["dropped"]["corrupt"] > 0
    assert run.coordinator.core.counters["failed_attempts"] == 0
    assert books["tokens"]["observed"] == run.server.generated


def test_other_servers_that_overrun_are_not_believed(trainer: Make) -> None:
    """vLLM's and SGLang's keep to what they are asked for: more tokens than that cannot be true."""
    run = trainer(lambda row, sample: 5, actor_rollout_ref__rollout__name="vllm")
    more = {"token_ids": list(range(101, 151)), "log_probs": [-1.0] * 50}
    run.server.wrong = [more]
    run.step()
    assert run.ask("ledgers")["tokens"]["dropped"] == {"corrupt": 50}
