"""april's carry in slime's checkpoints: a run that goes on skips no prompt, trains none twice, and loses no token."""

from __future__ import annotations

import stat
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from real_schedulers import LENGTHS, VOCAB, assert_nothing_is_left

from adapters import slime_functions_of_a_user as user
from adapters.slime_stand_in import DataSource, Sample, Tokenizer, installed, namespace
from adapters.test_slime_rollouts import simulated
from april.adapters.slime import make_generate_rollout
from april.engines.simulated.engine import synthetic_response
from april.errors import CheckpointError
from april.state_file import pack, write_state

USER = "adapters.slime_functions_of_a_user"


@pytest.fixture(autouse=True)
def framework() -> Iterator[None]:
    with installed():
        yield
    assert_nothing_is_left()


class Process:
    """One process of a run: begins at ``start``, from the checkpoint before it if there is one."""

    def __init__(self, directory: Path, start: int = 0, **flags: Any) -> None:
        self.args = namespace(save=str(directory), load=str(directory), **flags)
        self.data = DataSource(self.args)
        if start:
            self.data.load(start - 1)
        self.function = make_generate_rollout([simulated("e0"), simulated("e1")], check=True)

    def __call__(self, rollout_id: int) -> list[list[Sample]]:
        groups: list[list[Sample]] = self.function(self.args, rollout_id, self.data).samples
        return groups

    @property
    def session(self) -> Any:
        return self.function.function.sessions[id(self.data)]

    def end(self) -> None:
        """As a crash: what was not saved is gone."""
        self.function.function.close()


def path(directory: Path, rollout_id: int) -> Path:
    return directory / "rollout" / f"april_carry_{rollout_id}.msgpack"


def check(groups: list[list[Sample]]) -> None:
    """The very responses that would have come without the restart."""
    for s in (s for g in groups for s in g):
        response = s.tokens[-s.response_length :]
        key = (s.group_index, s.index % 2)
        prompt = Tokenizer().encode(s.prompt, add_special_tokens=False)
        tokens, logprobs = synthetic_response(prompt, key, 0, min(LENGTHS.sample(*key), 100), VOCAB, (0,))
        assert response[:-1] == tokens.tolist()[:-1]
        assert s.rollout_log_probs == logprobs.tolist()
        assert s.reward == s.response_length


@pytest.mark.parametrize("flags", [
    {},
    {"dynamic_sampling_filter_path": f"{USER}.keep_short"},
    {"group_rm": True, "custom_rm_path": f"{USER}.group_length"},
], ids=["plain", "filter", "group rewards"])  # fmt: skip
def test_a_run_that_goes_on_trains_every_prompt_once(tmp_path: Path, flags: dict[str, Any]) -> None:
    """Three processes, each ended two rollouts after its checkpoint, without notice: the history kept is whole."""
    trained: Counter[int] = Counter()
    drawn, start = 0, 0
    for _ in range(3):
        process = Process(tmp_path, start, **flags)
        for rollout_id in range(start, start + 6):
            groups = process(rollout_id)
            check(groups)
            if rollout_id < start + 4:  # what comes later is not in the checkpoint
                trained.update(g[0].group_index for g in groups)
            if rollout_id == start + 3:
                process.data.save(rollout_id)
                drawn = process.data.groups
        start += 4
        process.end()
    process = Process(tmp_path, start, **flags)
    trained.update(g[0].group_index for g in process(start))
    prompts = process.session.scheduler.ledger()["prompts"]
    process.end()
    assert set(trained.values()) == {1}
    assert prompts.delivered == len(trained) == 39
    assert prompts.observed == process.data.groups >= drawn
    assert prompts.observed == prompts.delivered + prompts.held + sum(prompts.dropped.values())


def test_a_batch_that_was_not_trained_on_comes_again(tmp_path: Path) -> None:
    """slime's asynchronous loop saves rollout r after it has asked for r + 1: that batch is delivered again."""
    process = Process(tmp_path)
    process(0)
    process(1)
    lost = process(2)
    process.data.save(1)
    process.end()
    process = Process(tmp_path, 2)
    again = process(2)
    process.end()
    check(again)
    assert [g[0].group_index for g in again] == [g[0].group_index for g in lost]
    assert [s.tokens for g in again for s in g] == [s.tokens for g in lost for s in g]
    # the saved weights were trained on rollout 1, those that generated rollout 2 were not
    for was, now in zip((s for g in lost for s in g), (s for g in again for s in g), strict=True):
        assert (was.metadata["april"]["version"], now.metadata["april"]["version"]) == ("0.2", "1.3")
        assert now.metadata["april"]["staleness"] == was.metadata["april"]["staleness"] + 1


def test_a_checkpoint_in_the_middle_of_a_rollout(tmp_path: Path) -> None:
    """miles saves beside the next rollout: each of the files written meanwhile is whole, and restores everything."""
    process = Process(tmp_path, custom_rm_path=f"{USER}.busy_reward")
    trained = {g[0].group_index for r in (0, 1) for g in process(r)}
    files: list[tuple[bytes, bytes]] = []
    one_by_one = threading.Lock()
    over: list[bool] = []

    def save() -> None:
        with one_by_one:
            if over:  # a reward that the rollout did not wait for
                return
            process.data.save(1)
            written = sorted((tmp_path / "rollout").iterdir())
            files.append((written[0].read_bytes(), written[1].read_bytes()))

    user.at_reward.append(save)
    try:
        process(2)
    finally:
        user.at_reward.clear()
    with one_by_one:
        over.append(True)
    process.end()
    names = sorted((tmp_path / "rollout").iterdir())
    for carry, state in files[:: max(1, len(files) // 4)]:
        names[0].write_bytes(carry)
        names[1].write_bytes(state)
        process = Process(tmp_path, 2)
        again: Counter[int] = Counter()
        for rollout_id in (2, 3, 4, 5):
            groups = process(rollout_id)
            check(groups)
            again.update(g[0].group_index for g in groups)
        books = process.session.scheduler.ledger()["prompts"]
        process.end()
        assert set(again.values()) == {1}
        assert not trained & set(again)
        assert books.observed == process.data.groups == len(trained) + len(again) + books.held
    assert files


def test_a_group_that_nobody_has_asked_for_is_kept(tmp_path: Path) -> None:
    """What the data source has given and april has not drawn yet is in the file: slime's own position is behind it."""
    process = Process(tmp_path)
    process(0)
    (ahead,) = process.data.get_samples(1)
    process.session._groups.ahead.append(ahead)
    process.data.save(0)
    process.end()
    process = Process(tmp_path, 1)
    delivered = {g[0].group_index for rollout_id in range(1, 8) for g in process(rollout_id)}
    books = process.session.scheduler.ledger()["prompts"]
    process.end()
    assert ahead[0].group_index in delivered
    assert books.observed == process.data.groups


def test_versions_go_on_over_a_restart(tmp_path: Path) -> None:
    """Tokens from before keep their stamp and their distance; names of versions are kept as well."""
    process = Process(tmp_path)
    for rollout_id in range(3):
        process(rollout_id)
    process.data.save(2)
    process.end()
    process = Process(tmp_path, 3)
    samples = [s for g in process(3) for s in g]
    process.end()
    old = [s for s in samples if s.metadata["april"]["spans"][0][2].startswith("0.")]
    assert old
    assert {s.metadata["april"]["version"] for s in samples} == {"1.3"}
    for s in old:
        first = int(s.metadata["april"]["spans"][0][2].partition(".")[2])
        assert s.metadata["april"]["staleness"] == 3 - first
        assert s.metadata["start_rollout_id"] == first
        assert s.weight_versions[0] == str(first)


def test_a_custom_generate_function_goes_on_with_its_sample(tmp_path: Path) -> None:
    """What a function of the user has made of unfinished samples is in the checkpoint too."""
    flags = {"custom_generate_function_path": f"{USER}.generate"}
    process = Process(tmp_path, **flags)
    first = process(0)
    process.data.save(0)
    process.end()
    process = Process(tmp_path, 1, **flags)
    second = process(1)
    process.end()
    for s in (s for g in second for s in g):
        assert s.tokens == [1, 2, *range(10, 15 + 3 * s.index % 40)]
    assert not {g[0].group_index for g in first} & {g[0].group_index for g in second}


def test_the_file_is_for_its_owner_and_is_plain(tmp_path: Path) -> None:
    """Mode 0600, msgpack, and nothing half-written beside it."""
    process = Process(tmp_path)
    process(0)
    process.data.save(0)
    process.end()
    file = path(tmp_path, 0)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [p.name for p in sorted(file.parent.iterdir())] == [file.name, "global_dataset_state_dict_0.json"]
    outer = msgspec.msgpack.decode(file.read_bytes())
    assert set(outer) == {"april", "format", "checksum", "content"}
    assert set(msgspec.msgpack.decode(outer["content"])) == {"state", "lag", "names", "ahead", "held", "finished"}


@pytest.mark.parametrize(("content", "said"), [
    (b"\x93", "cannot be read"),
    (msgspec.msgpack.encode({"a": 1}), "another version of april, or is none"),
    (pack("slime", {"a": 1}), "damaged"),
    (pack("slime", {"a": 1})[:-1] + b"\x02", "its checksum does not fit its content"),
    (pack("trl", {"a": 1}), "another version of april, or is none"),
])  # fmt: skip
def test_a_carry_that_is_none_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    """One sentence that names the file or the damage, and nothing begins."""
    process = Process(tmp_path)
    process(0)
    process.data.save(0)
    process.end()
    path(tmp_path, 0).write_bytes(content)
    process = Process(tmp_path, 1)
    with pytest.raises(CheckpointError, match=said):
        process(1)


def test_a_checkpoint_without_carry_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that began with slime's own function goes on, and the log says what is missing."""
    process = Process(tmp_path)
    process.data.save(0)
    process = Process(tmp_path, 1)
    process(1)
    process.end()
    assert "goes on from a checkpoint that april has not written" in caplog.text


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A sample with something that is no plain value."""
    with pytest.raises(CheckpointError, match="cannot be saved: a object is no plain value"):
        write_state(tmp_path / "x", "slime", {"held": {"0.0": {"image": object()}}})
    assert not list(tmp_path.iterdir())
