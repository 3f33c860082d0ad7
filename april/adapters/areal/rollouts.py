"""The rollouts of a rank: workflows that ask april's coordinator, on april's own loop, while the trainer trains or
waits.

Invariants: between ``pause`` and ``resume`` no request of april's is at any server; a group's rows and trajectories are
kept from the moment it is drawn until it is delivered or dropped, and saved with the coordinator's state in one piece.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from april.config.settings import Config
from april.core.settings import EngineLimits
from april.driver.loop_thread import LoopThread
from april.errors import CheckpointError, RolloutError
from april.processes.coordinator.calls import Session, run_sample
from april.processes.coordinator.coordinator import Coordinator
from april.processes.coordinator.media import KINDS
from april.processes.coordinator.messages import Delivery
from april.processes.coordinator.run import Run
from april.state_file import read_state, write_state

TENSOR = "__tensor__"


def plain(value: Any, where: str) -> Any:
    """``value`` with its tensors and arrays as (dtype, shape, bytes); ``where`` it stands is for the message.

    Raises:
        CheckpointError: it holds something else than numbers, text, bytes, lists, mappings, tensors and arrays.
    """
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, dict):
        return {key: plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    try:
        tensor = torch.as_tensor(value).detach().cpu().contiguous()
    except (TypeError, ValueError, RuntimeError):
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, which april cannot keep over a restart: let the data set give "
            "numbers, text, lists, mappings, tensors or arrays, or set recover.mode to disabled"
        ) from None
    content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return {TENSOR: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), content]}


def restored(value: Any) -> Any:
    """The way back; what was an array is a tensor now."""
    if isinstance(value, list):
        return [restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    if TENSOR not in value:
        return {key: restored(item) for key, item in value.items()}
    name, shape, content = value[TENSOR]
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"april's state is damaged: there is no tensor of {name!r}")
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


log = logging.getLogger("april")

class Prompts:
    """The loader's batches, epoch after epoch.

    Args:
        loader: its order is another one in each epoch, as AReaL has it, also after a restart.
        epoch: that begins, or is gone on with.
    """

    def __init__(self, loader: Any, epoch: int = 0) -> None:
        self._loader = loader
        self.epoch = epoch
        self._batches = self._all()

    def next(self) -> list[Any]:
        """Rows of the next batch, all of which are the caller's now."""
        return list(next(self._batches))

    def _all(self) -> Iterator[Any]:
        empty = 0
        while True:
            set_epoch = getattr(getattr(self._loader, "sampler", None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch)
            for batch in self._loader:
                empty = 0
                yield batch
            empty += 1
            if empty > 1:  # the first may be the end of an epoch that a restart goes on with
                raise RolloutError("the loader of prompts gives no batch; is the data set smaller than a batch?")
            self.epoch += 1


KIND = "areal"
SERVERS = "areal"
"""AReaL spreads requests over its servers itself, so they are one engine to the core."""
Trajectory = dict[str, Any]


class Rollouts:
    """The rollouts of a rank, from the first batch on.

    Args:
        config: april's, of this rank.
        limits: of the servers, as one engine.
        prompts: whole batches of rows.
        episode: runs the workflow once for a row: its trajectory, or None if it was rejected.
        join: trajectories of one group as one.
        accepts: AReaL's filter of joined trajectories; None: there is none.
        abort: ends every request at every server, of which new ones may come at once.
        check: cross-check april's books after every event.
    """

    def __init__(
        self, config: Config, limits: EngineLimits, prompts: Prompts,
        episode: Callable[[Any], Awaitable[Trajectory | None]], join: Callable[[list[Trajectory]], Trajectory],
        accepts: Callable[[Trajectory], bool] | None, abort: Callable[[], None], *, check: bool = False,
    ) -> None:  # fmt: skip
        self.config, self.prompts = config, prompts
        self._episode, self._join, self._accepts, self.abort = episode, join, accepts, abort
        # a workflow rejects by returning None, so every group is judged
        core = config.core_settings(
            has_reward=False, group_reward=False, has_filter=True, run_id=secrets.randbits(64), attachments=KINDS
        )
        self._rows: dict[str, Any] = {}
        """Rows of the groups under way, by the prompt's uid."""
        self._done: dict[tuple[str, int], Trajectory | None] = {}
        """Trajectories of samples that have returned, by (uid, sample)."""
        self._drawn = 0
        self._thread = LoopThread("april-areal")
        self._coordinator = Coordinator(core, limits, accepts=self._accept, check=check)
        continuous = config.generation == "continuous"
        self.run = Run(self, config.rollout_batch_size, own_thread=continuous)

    # ---------------------------------------------------------------- for the trainer

    def next_batch(self, label: int, count: int) -> tuple[list[Trajectory], Delivery]:
        """A joined trajectory per group, under the weights that the trainer calls ``label``."""
        delivery = self.run.next_batch(label, count)
        return self._thread.call(lambda: [self._joined_group(uid, delivery) for uid in delivery.uids]), delivery

    def close(self) -> None:
        """End the run; what is held, and no checkpoint has, is gone."""
        self.run.close()
        self._thread.stop()

    def _joined_group(self, uid: str, delivery: Delivery) -> Trajectory:
        group = self._join(self._forget(uid))
        masked = {index: mask for (of, index), mask in delivery.masked.items() if of == uid}
        for index, mask in masked.items():
            if len(group["loss_mask"]) != self.config.n_samples_per_prompt:
                raise RolloutError(
                    f"tokens of prompt {uid} are older than max_head_offpolicyness, and its workflow gives several "
                    "rows per sample, so april cannot take the loss off them; set april={'on_stale': 'drop'}"
                )
            group["loss_mask"][index, : len(mask)] *= group["loss_mask"].new_tensor(mask)
        return group

    # ---------------------------------------------------------------- for the run

    def ask(self, method: str, *args: Any) -> Any:
        """Call the coordinator on its loop."""
        return self._thread.run(lambda: getattr(self._coordinator, method)(*args))

    def fetch(self, count: int) -> None:
        """Rows of whole batches of the loader, so that its state and april's leave none between them."""
        found = 0
        while found < count:
            rows = self.prompts.next()
            self._offer(rows)
            found += len(rows)

    def _offer(self, rows: Sequence[Any]) -> None:
        first, self._drawn = self._drawn, self._drawn + len(rows)
        self.run.offer((f"p{number}", (f"p{number}", row)) for number, row in enumerate(rows, first))

    def dispatch(self, rows: Sequence[tuple[str, Any]]) -> None:
        """Start the rollouts of these prompts."""

        def start() -> None:
            for uid, row in rows:
                self._rows[uid] = row
                self._thread.follow(self._group(uid, row))

        self._thread.call(start)

    # ---------------------------------------------------------------- on the loop

    async def _group(self, uid: str, row: Any) -> None:
        async def rollout(session: Session) -> None:
            session.keys.append(str(session.index))
            self._done[uid, session.index] = await self._episode(row)

        async def forget(keys: list[str]) -> None:
            for key in keys:
                self._done.pop((uid, int(key)), None)

        n = self.config.n_samples_per_prompt
        await asyncio.gather(*(run_sample(self._coordinator, uid, i, rollout, forget) for i in range(n)))
        if await self._coordinator.closed(uid):
            self._forget(uid)

    def _accept(self, uid: str) -> bool:
        """The verdict on a group whose samples have all returned."""
        kept = self._kept(uid)
        if not kept:
            return False
        joined = self._join(kept)
        return self._accepts is None or bool(self._accepts(joined))

    def _kept(self, uid: str) -> list[Trajectory]:
        """Trajectories of a prompt's samples, those left out that the workflow rejected."""
        found = (self._done.get((uid, index)) for index in range(self.config.n_samples_per_prompt))
        return [trajectory for trajectory in found if trajectory is not None]

    def _forget(self, uid: str) -> list[Trajectory]:
        """A prompt is settled; its trajectories."""
        kept = self._kept(uid)
        self._rows.pop(uid, None)
        for index in range(self.config.n_samples_per_prompt):
            self._done.pop((uid, index), None)
        return kept

    # ---------------------------------------------------------------- checkpoints

    def save(self, path: Path) -> None:
        """Everything that is not in the batches delivered so far; the trainer has trained on them all.

        Raises:
            CheckpointError: a row or trajectory is not made of plain values, or the file cannot be written.
        """
        write_state(path, KIND, self._thread.run(self._content))

    async def _content(self) -> dict[str, Any]:
        state = await self._coordinator.state()
        held = _held(state)
        done = {key: t for key, t in self._done.items() if key[0] in held}
        return {
            "coordinator": state,
            "rows": {uid: plain(self._rows[uid], "a prompt") for uid in held},
            "done": [[uid, index, plain(t, "a trajectory")] for (uid, index), t in done.items()],
            "offered": [[uid, plain(row, "a prompt")] for uid, (_, row) in self.run.offered],
            "drawn": self._drawn,
            "epoch": self.prompts.epoch,
        }

    def restore(self, path: Path) -> None:
        """Go on from a saved state, before the first batch.

        Raises:
            CheckpointError: the file is not there, damaged, or belongs to other settings.
        """
        content = read_state(path, KIND)
        try:
            state, rows = content["coordinator"], restored(content["rows"])
            self._drawn, self.prompts.epoch = content["drawn"], content["epoch"]
            self._done = {(uid, index): restored(t) for uid, index, t in content["done"]}
            offered = [(uid, (uid, restored(row))) for uid, row in content["offered"]]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"april's state in {path} is damaged: {type(error).__name__}: {error}") from error
        stored = {uid: [index for of, index in self._done if of == uid] for uid in rows}
        held = self.ask("restore", state, stored)
        self.dispatch([(uid, rows[uid]) for uid in held])
        self.run.offer(offered)
        log.info("april goes on with %d prompts", len(held))


def _held(state: dict[str, Any]) -> list[str]:
    """Prompts that a state of the coordinator holds."""
    groups = state["rollouts"]
    return [group["data"]["uid"] for part in ("ready", "waiting") for group in groups[part]]
