"""A delivered batch against what was handed over: whole groups, each settled once, every token with its provenance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from core_world import Life, generated

from april.core.batch import Batch
from april.core.types import OnDataEnd, OnStale

if TYPE_CHECKING:
    from core_player import CorePlayer


def check_batch(player: CorePlayer, batch: Batch) -> None:
    """A batch: whole groups, each settled now, every token as it was handed over."""
    world, n = player.world, player.settings.n_samples_per_prompt
    player.stop_step()
    assert batch.id == world.batches
    assert batch.version == world.version
    assert batch.trained_at == (world.version[0], world.version[1] + len(world.leased))
    assert set(batch.group_sizes) == {n}
    leased = {}
    for row, sample in enumerate(batch.samples):
        key = tuple(sample.id)
        assert key[1] == row % n
        if key[1] == 0:
            leased[key[0]] = world.held.pop(key[0])
            world.settle(leased[key[0]].prompt, f"delivered in {batch.id}")
            assert leased[key[0]].accepted
        assert sample.prompt.data["k"] == sample.prompt.position == leased[key[0]].prompt
        check_sample(player, sample, leased[key[0]].lives[key[1]], batch.trained_at.n)
        player.functions.discard(key)
    if len(leased) != player.chosen["n"]:
        assert len(leased) < player.chosen["n"]
        assert world.exhausted
        assert not world.held
        assert player.settings.on_data_end is OnDataEnd.SHORT
    world.leased[batch.id] = leased
    world.batches += 1
    world.fresh = False
    if player.continuous:  # the next one is trained a version later
        world.drop_too_old(player.settings)


def check_sample(player: CorePlayer, sample: Any, life: Life, trained_at: int) -> None:
    """One delivered response against what was handed over."""
    bound, s = player.settings.max_staleness, player.settings
    assert life.where == "finished"
    assert sample.tokens.tolist() == [t.id for t in life.tape]
    assert sample.logprobs.tolist() == [t.logprob for t in life.tape]
    versions = [tuple(v) for v in sample.versions.tolist()]
    own = [t.version for t in life.tape]
    assert all(b is None or a == b for a, b in zip(versions, own, strict=True))
    assert [v for v in own if v] == sorted(v for v in own if v)
    assert sample.reward == life.reward
    assert sample.staleness == player.world.age(life)
    masks = s.on_stale in (OnStale.MASK, OnStale.FINISH)
    assert sample.loss_mask.tolist() == [v is not None and not (masks and trained_at - v[1] > bound) for v in own]
    if player.strict and s.on_stale is not OnStale.MASK:
        assert sample.staleness <= bound
    player.world.delivered += generated(life.tape)
