"""What every adapter promises: prompts trained once, tokens exact and of known weights, failures named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapters.players import PLAYERS, QUORUM, Life, OpenRlhf, Player, Response
from april.errors import CheckpointError, RolloutError
from april.serialization.state_file import MAGIC


@pytest.fixture(params=PLAYERS)
def player(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Player:
    """A trainer of each kind."""
    monkeypatch.setattr("april.config.settings.RETRY_PAUSE_S", 0.0)
    return PLAYERS[request.param](tmp_path, monkeypatch)


def rows_of(batches: list[list[Response]]) -> Counter[int]:
    return Counter(response.row for batch in batches for response in batch)


def check_books(life: Life, kept: list[Response]) -> None:
    """april's ledgers against what the trainer was given in the history that its checkpoints have kept."""
    for book in (life.prompts, life.tokens):
        assert book.observed == book.delivered + book.held + sum(book.dropped.values())
    assert life.prompts.observed == life.given
    assert life.tokens.delivered == sum(len(response.tokens) for response in kept)


def fails_for_some(row: int, number: int, length: int) -> float:
    """Every fifth row once for good, as five calls are more than the tries of one of its samples."""
    if row % 5 == 3 and number <= 3:
        raise ValueError("not readable")
    return 1.0 + row % 3


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a filter": {"keeps": lambda row: row % 4 > 0},
    "samples that fail": {"judge": fails_for_some, "own": {"on_failed_sample": "replace"}},
    "continuous": {"own": {"generation": "continuous"}},
    "stepwise": {"own": {"generation": "stepwise"}},
    "a quorum": {"own": QUORUM, "judge": lambda row, number, length: float(length)},
}


DECIDED = {  # by the trainer itself
    "trl": ("samples that fail", "continuous", "stepwise"), "trl_async": ("continuous", "stepwise"),
    "slime": ("continuous", "stepwise"), "verl": ("continuous", "stepwise"),
    "openrlhf": ("a quorum",), "areal": ("a quorum",),
}  # fmt: skip


@pytest.mark.parametrize(
    ("player", "mode"), [(name, mode) for name in PLAYERS for mode in MODES if mode not in DECIDED[name]],
    indirect=["player"],
)  # fmt: skip
def test_every_prompt_is_trained_once_over_restarts(player: Player, mode: str) -> None:
    """Three lives, each ended two steps after its checkpoint: nothing is lost, made twice or passed over.

    Cut responses go on with their tokens, also over a restart; each token has the weights that wrote it.
    """
    options, lives, kept = MODES[mode], list[Life](), list[Response]()
    for _ in range(3):
        lives.append(player.live(3, 2, **options))
        kept += [response for batch in lives[-1].batches[:3] for response in batch]
    last = player.live(1, **options)
    check_books(last, kept + last.batches[0])
    resumed = older = 0
    for life, first in zip([*lives, last], (0, 3, 6, 9), strict=True):
        for step, batch in enumerate(life.batches, first):
            assert len(batch) == player.groups * player.n
            assert len({response.row for response in batch}) == player.groups or mode == "a quorum"
            for response in batch:
                assert response.uncut is None or mode == "samples that fail" or response.tokens == response.uncut
                assert len(response.versions) == len(response.tokens)
                assert response.versions == sorted(response.versions)
                assert step - 5 <= response.versions[0] <= response.versions[-1] <= step
                resumed += response.versions[0] < response.versions[-1]
                older += life is not lives[0] and step == first and response.versions[0] < first
    for life, after in pairwise(lives if mode == "a quorum" else []):  # baselines are those of the first finishers
        fixed = {response.row for batch in life.batches[:3] for response in batch}
        lost = {(r.row, r.sample, *r.tokens): r.advantage for b in life.batches[3:] for r in b if r.row in fixed}
        again = {(r.row, r.sample, *r.tokens): r.advantage for b in after.batches for r in b}
        assert all(again[name] == pytest.approx(lost[name]) for name in lost.keys() & again.keys())
    assert resumed
    assert older  # from before a restart
    trained = Counter((response.row, response.sample) for response in kept + last.batches[0])
    assert set(trained.values()) == {1}
    whole = Counter(row for row, _ in trained)
    assert sum(count == player.n for count in whole.values()) == last.prompts.delivered or mode == "a quorum"
    assert last.prompts.dropped.keys() == ({"filtered"} if mode == "a filter" else set())
    assert mode != "a filter" or all(row % 4 for row in whole)


@pytest.mark.parametrize("policy", ["drop_group", "replace"])
def test_a_reward_that_fails(player: Player, policy: str) -> None:
    """Once is tried again. For good, it costs its group by name, or its response alone, which a fresh one replaces."""

    def judge(row: int, number: int, length: int) -> float:
        tries = 5 if policy == "replace" else 99  # of two responses; three tries give one up
        if (row == 1 and number <= tries) or (row == 2 and number == 1):
            raise OSError("no answer")
        return 1.0

    life = player.live(4, own={"on_failed_sample": policy}, judge=judge)
    rows = rows_of(life.batches)
    assert set(rows.values()) == {player.samples}
    assert life.prompts.dropped == ({"failed": 1} if policy == "drop_group" and player.calls[1] else {})
    assert (1 in rows) <= (policy == "replace")
    assert 2 in rows or not player.calls[2]


def test_rewards_that_never_work_end_the_run_with_their_own_words(player: Player) -> None:
    """After eight groups in a row."""

    def judge(row: int, number: int, length: int) -> float:
        raise ValueError("the judge is down")

    with pytest.raises(RolloutError, match="the judge is down"):
        player.live(1, judge=judge)


def end_of(data: bytes) -> tuple[bytes, dict[str, Any]]:
    """Long values of a file, and what is packed behind them."""
    start = len(data) - 8 - int.from_bytes(data[-8:], "big")
    return data[:start], msgspec.msgpack.decode(data[start:-8])


def packed_otherwise(data: bytes, **changes: Any) -> bytes:
    values, end = end_of(data)
    packed = msgspec.msgpack.encode(end | changes)
    return values + packed + len(packed).to_bytes(8, "big")


def one_bit_less(data: bytes) -> bytes:
    content = bytearray(end_of(data)[1]["content"])
    content[len(content) // 2] ^= 1
    return packed_otherwise(data, content=bytes(content))


@pytest.mark.parametrize(("harm", "said"), [
    (lambda data: b"\xc1", "not written by this version of april"),
    (lambda data: data[:-9], "cannot be read|is damaged"),
    (lambda data: msgspec.msgpack.encode({"a": 1}), "not written by this version of april"),
    (lambda data: data.replace(MAGIC, b"april 7\n", 1), "not written by this version of april"),
    (lambda data: packed_otherwise(data, april="demo"), "not written by this version of april"),
    (one_bit_less, "is damaged: its checksum does not fit its content"),
], ids=["no msgpack", "cut", "something else", "another format", "of another adapter", "one bit"])  # fmt: skip
def test_a_state_that_is_not_whole_is_refused(player: Player, harm: Callable[[bytes], bytes], said: str) -> None:
    """Instead of prompts that are lost in silence; a file is its owner's alone."""
    player.live(1)
    if isinstance(player, OpenRlhf):
        import torch

        assert player.saved is not None
        data = harm(bytes(player.saved["april"].tolist()))
        player.saved["april"] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    else:
        file = player.state_file()
        assert file.stat().st_mode & 0o777 == 0o600
        file.write_bytes(harm(file.read_bytes()))
    with pytest.raises(CheckpointError, match=said):
        player.live(1)
