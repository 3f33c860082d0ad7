"""The trainer's half of a run: prompts that wait, orders of the coordinator, checkpoints.

Invariant: between two steps no request of april's is at any server, so the trainer may put its servers to sleep, change
their weights, and validate. What has to be done through the trainer is done by ``trainer``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from april.atomic_file import write_atomic
from april.coordinator.messages import Delivery
from april.errors import CheckpointError, RolloutError
from april.state_file import pack, unpack

log = logging.getLogger("april")

STATE_FILE, KIND = "april_state.msgpack", "desk"


class Trainer(Protocol):
    """What the run does through the trainer."""

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the coordinator and wait for what it returns."""

    def fetch(self, count: int) -> None:
        """Have the trainer submit this many prompts; they come in through :meth:`Run.offer` before this returns."""

    def dispatch(self, rows: Sequence[Any]) -> None:
        """Start the rollouts of these prompts."""

    def abort(self) -> None:
        """End every request at every server."""


class Run:
    """What lives as long as the trainer."""

    def __init__(self, trainer: Trainer, groups: int) -> None:
        self._trainer = trainer
        self._groups = groups
        self._offered: deque[tuple[str, Any]] = deque()
        self.dropped: dict[str, int] = {}
        """Prompts of the present step that were given up, by reason."""

    def offer(self, rows: Iterable[tuple[str, Any]]) -> None:
        """Prompts, (uid, whatever :meth:`Trainer.dispatch` takes), that the trainer has submitted."""
        self._offered.extend(rows)

    def next_batch(self, label: int, count: int) -> Delivery:
        """A step under the weights that the trainer calls ``label``.

        Raises:
            RolloutError: the step cannot go on; the message says why. Or another number of prompts is asked for.
        """
        if count != self._groups:
            raise RolloutError(f"the trainer asked for {count} prompts, and its configuration says {self._groups}")
        self.dropped = {}
        self._trainer.ask("begin", label)
        while True:
            for order in self._trainer.ask("orders"):
                match order:
                    case ("draw", wanted):
                        self._draw(wanted)
                    case ("abort",):
                        self._trainer.abort()
                    case ("dropped", reason, why):
                        self.dropped[reason] = self.dropped.get(reason, 0) + 1
                        if reason != "filtered":
                            log.warning("a prompt was given up (%s): %s", reason, why)
                    case ("deliver", delivery):
                        return delivery  # type: ignore[no-any-return]
                    case ("fail", error):
                        raise RolloutError(error)

    def _draw(self, count: int) -> None:
        if (missing := count - len(self._offered)) > 0:
            self._trainer.fetch(missing)
        taken = [self._offered.popleft() for _ in range(min(count, len(self._offered)))]
        self._trainer.ask("drawn", [uid for uid, _ in taken])
        self._trainer.dispatch([row for _, row in taken])

    # ---------------------------------------------------------------- checkpoints

    def save(self, folder: Path) -> None:
        """april's state beside the trainer's own checkpoint.

        Raises:
            CheckpointError: it cannot be written.
        """
        try:
            write_atomic(folder / STATE_FILE, pack(KIND, self._trainer.ask("state")))
        except OSError as error:
            raise CheckpointError(f"april's state cannot be written to {folder}: {error.strerror}") from error

    def restore(
        self, folder: Path, stored: dict[str, list[int]], row_of: Callable[[list[str]], Sequence[Any]]
    ) -> tuple[set[str], set[str]]:
        """Go on from a checkpoint; the prompts that april holds, and those that it has dropped and the trainer has not.

        Args:
            folder: of the trainer's checkpoint, with april's state in it.
            stored: for each prompt that the trainer has, the samples whose trajectory is there.
            row_of: rows for :meth:`Trainer.dispatch` of prompts that the trainer has.

        Raises:
            CheckpointError: the state is damaged, or belongs to another checkpoint.
        """
        try:
            data = (folder / STATE_FILE).read_bytes()
        except OSError as error:
            raise CheckpointError(f"april's state in {folder} cannot be read: {error}") from error
        state = unpack(KIND, data, str(folder))
        held = {g["data"]["uid"] for part in ("ready", "waiting") for g in state["rollouts"][part]}
        dropped = set(state["dropped"])
        # those that are complete wait to be settled: they may be too old one day, and begin again
        self._trainer.dispatch(row_of(self._trainer.ask("restore", state, stored)))
        log.info("april goes on with %d prompts", len(held))
        return held, dropped
