"""The trainer's half of a run: prompts that wait, orders of the coordinator, checkpoints.

Invariant: stepwise, no request of april's is at any server between two steps, so the trainer may put its servers to
sleep, change their weights, and validate; with continuous generation that holds between ``pause`` and ``resume``. What
has to be done through the trainer is done by ``trainer``.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from april.errors import RolloutError, SchedulerClosed
from april.processes.coordinator.messages import Delivery, Order
from april.state_file import read_state, write_state

log = logging.getLogger("april")

STATE_FILE, KIND = "april_state.msgpack", "desk"


class Trainer(Protocol):
    """Calls of the run into the trainer."""

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the coordinator and wait for what it returns."""

    def fetch(self, count: int) -> None:
        """Have the trainer submit this many prompts; they come in through :meth:`Run.offer` before this returns."""

    def dispatch(self, rows: Sequence[Any]) -> None:
        """Start the rollouts of these prompts."""

    def abort(self) -> None:
        """End every request at every server."""


class Run:
    """The trainer's half of a run; it lives as long as the trainer.

    Args:
        trainer: what is done through it is done in the thread that asks for batches, or in a thread of the run's own.
        groups: that it asks for.
        own_thread: orders are carried out while nobody asks, as continuous generation needs; then :meth:`close`.
    """

    def __init__(self, trainer: Trainer, groups: int, *, own_thread: bool = False) -> None:
        self._trainer = trainer
        self._groups = groups
        self._offered: deque[tuple[str, Any]] = deque()
        self._orders: deque[Order] = deque()
        self._dropped: dict[str, int] = {}
        self.dropped: dict[str, int] = {}
        """Prompts that were given up between the last two deliveries, by reason."""
        self._told: SimpleQueue[tuple[str, Any] | BaseException] | None = None
        self._broken: BaseException | None = None
        """The error that has ended the thread of the run's own."""
        if own_thread:
            self._told = SimpleQueue()
            threading.Thread(target=self._carry_out_all, name="april-orders", daemon=True).start()

    def offer(self, rows: Iterable[tuple[str, Any]]) -> None:
        """Prompts, (uid, whatever :meth:`Trainer.dispatch` takes), that the trainer has submitted."""
        self._offered.extend(rows)

    @property
    def offered(self) -> list[tuple[str, Any]]:
        """Prompts that the core has not drawn yet."""
        return list(self._offered)

    def next_batch(self, label: int, count: int) -> Delivery:
        """A batch under the weights that the trainer calls ``label``.

        Raises:
            RolloutError: the step cannot go on; the message says why. Or another number of prompts is asked for.
        """
        if count != self._groups:
            raise RolloutError(f"the trainer asked for {count} prompts, and its configuration says {self._groups}")
        self._ask("begin", label)
        kind, told = self._next_told()
        if kind == "fail":
            raise RolloutError(told)
        assert isinstance(told, Delivery)
        return told

    def pause(self) -> None:
        """Until :meth:`resume` no request of april's is at any server, and nothing is drawn from the trainer's data.

        Raises:
            RolloutError: the step has failed, or its batch has come, and nobody has taken it.
        """
        self._ask("pause")
        kind, told = self._next_told()
        if kind != "paused":
            raise RolloutError(
                told if kind == "fail" else "a batch was asked for and not taken, so its prompts would be lost; go on "
                "from the last checkpoint"
            )

    def resume(self, label: int) -> None:
        """Go on, under the weights that the trainer calls ``label``."""
        self._trainer.ask("resume", label)

    def close(self) -> None:
        """End the thread."""
        self._trainer.ask("close")

    # ---------------------------------------------------------------- orders

    def _next_told(self) -> tuple[str, Any]:
        told = self._until_told() if self._told is None else self._told.get()
        if isinstance(told, BaseException):
            raise told
        return told

    def _ask(self, method: str, *args: Any) -> None:
        """Ask what the coordinator answers by an order; raise what has ended the thread that would carry it out."""
        if self._broken is not None:
            raise self._broken
        self._trainer.ask(method, *args)

    def _carry_out_all(self) -> None:
        assert self._told is not None
        try:
            while (told := self._until_told())[0] != "closed":
                self._told.put(told)
            self._broken = SchedulerClosed("the run is closed: nobody carries out its orders any more")
        except BaseException as error:
            self._broken = error
        self._told.put(self._broken)  # for whoever waits

    def _until_told(self) -> tuple[str, Any]:
        """Carry out orders up to one that the trainer waits for: deliver, fail, paused, or that this is the end."""
        while True:
            while self._orders:
                match self._orders.popleft():
                    case ("draw", wanted):
                        self._draw(wanted)
                    case ("abort",):
                        self._trainer.abort()
                    case ("dropped", reason, why):
                        self._dropped[reason] = self._dropped.get(reason, 0) + 1
                        if reason != "filtered":
                            log.warning("a prompt was given up (%s): %s", reason, why)
                    case (kind, *what):
                        if kind == "deliver":
                            self.dropped, self._dropped = self._dropped, {}
                        return kind, what[0] if what else None
            self._orders.extend(self._trainer.ask("orders"))

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
        write_state(folder / STATE_FILE, KIND, self._trainer.ask("state"))

    def restore(
        self, folder: Path, stored: dict[str, list[int]], row_of: Callable[[list[str]], Sequence[Any]]
    ) -> tuple[dict[str, list[int]], set[str]]:
        """Go on from a checkpoint.

        Returns:
            The prompts that april holds, each with its rollouts whose sample is; and those that it has dropped and the
            trainer has not.

        Args:
            folder: of the trainer's checkpoint, with april's state in it.
            stored: for each prompt that the trainer has, the samples whose trajectory is there.
            row_of: rows for :meth:`Trainer.dispatch` of prompts that the trainer has.

        Raises:
            CheckpointError: the state is damaged, or belongs to another checkpoint.
        """
        state = read_state(folder / STATE_FILE, KIND)
        dropped = set(state["dropped"])
        # those that are complete wait to be settled: they may be too old one day, and begin again
        self._trainer.dispatch(row_of(self._trainer.ask("restore", state, stored)))
        held = self._trainer.ask("held")
        log.info("april goes on with %d prompts", len(held))
        return held, dropped
