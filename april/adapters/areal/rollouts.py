"""Runs the rollouts of one AReaL rank: april's scheduler calls AReaL's workflow, which generates on AReaL's servers.

Invariant: no server has a request from april between ``pause`` and ``resume`` or, if the setting ``generation`` is
stepwise, between two batches.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from itertools import groupby
from pathlib import Path
from typing import Any

from april.adapters.common.data_loader import RowQueue
from april.adapters.common.deliveries import Deliveries, checkpoint_errors, saved_groups
from april.adapters.common.samples import is_masked
from april.adapters.common.trainer_servers import TrainerServers
from april.config.settings import Config
from april.core.batch import DeliveredSample
from april.core.types import GenerationMode, Prompt
from april.driver.llm import LLM
from april.driver.rewards import Response
from april.errors import CheckpointError, RolloutError
from april.scheduler import RolloutScheduler
from april.serialization.plain_values import plain, restored
from april.serialization.state_file import read_state, write_state

KIND = "areal"
Trajectory = dict[str, Any]
CURRENT_LLM: ContextVar[LLM | None] = ContextVar("april_llm", default=None)
"""april's LLM handle for the running workflow; None if AReaL itself runs the workflow, as in an evaluation."""


class ArealPrompts:
    """Iterates endlessly over the rows of AReaL's loader, as prompts without tokens (workflows tokenize them).

    Each epoch has its own order, which stays the same after a restart.
    """

    resumes = True
    """True tells april not to restore the position in the prompts: AReaL's loader does that itself."""
    attachments = ("image",)

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.epoch = 0
        self._batches: Iterator[Any] | None = None
        self._empty = 0
        self.carried = RowQueue(self._next)

    def __iter__(self) -> ArealPrompts:
        return self

    def __next__(self) -> dict[str, Any]:
        return {"row": self.carried.draw()}

    def _next(self) -> list[Any]:
        """Return the rows of the loader's next batch; after the last one, begin the next epoch."""
        while True:
            if self._batches is None:
                set_epoch = getattr(getattr(self._loader, "sampler", None), "set_epoch", None)
                if set_epoch is not None:
                    set_epoch(self.epoch)
                self._batches = iter(self._loader)
            for batch in self._batches:
                self._empty = 0
                return list(batch)
            self._batches = None
            self._empty += 1
            if self._empty > 1:  # one empty pass is allowed, since a restored loader may be at the end of its epoch
                raise RolloutError("the prompt loader returns no batch; is the data set smaller than a batch?")
            self.epoch += 1


class ArealRollouts:
    """Makes the training batches of one rank; created when the trainer asks for its first batch.

    Args:
        end_all: function that ends every request at the servers, which then accept new requests at once.
        episode: coroutine that runs the workflow once for a data row; returns its trajectory, or None if it rejects.
        join: function that joins the trajectories of a group.
        accepts: AReaL's filter for joined trajectories; None means no filter.
    """

    def __init__(
        self, config: Config, servers: TrainerServers, end_all: Callable[[], None], prompts: ArealPrompts,
        episode: Callable[[Any], Awaitable[Trajectory | None]], join: Callable[[list[Trajectory]], Trajectory],
        accepts: Callable[[Trajectory], bool] | None, *, check: bool = False,
    ) -> None:  # fmt: skip
        self.config, self.prompts = config, prompts
        self._servers, self._end_all = servers, end_all
        self._episode, self._join, self._accepts = episode, join, accepts
        self.deliveries = Deliveries()
        self._continuous = config.generation is GenerationMode.CONTINUOUS
        # the scheduler gets a filter even without ``accepts``, because workflows reject samples by returning None
        self.scheduler = RolloutScheduler(
            config, prompts=prompts, engines=[servers], rollout=self._rollout, reward=None, filter=self._keep,
            check=check, progress=False,
        )  # fmt: skip

    # ---------------------------------------------------------------- for the trainer

    def next_batch(self, label: int) -> tuple[list[Trajectory], dict[str, float]]:
        """Return the next batch, one joined trajectory per group, and its metrics.

        ``label`` is the trainer's version number of the weights that the servers hold.
        """
        now, last = self.scheduler.version.n, self.deliveries.last
        if self._continuous and last is not None and label != now:
            raise RolloutError(
                f"the weights changed from {now} to {label} while requests were at the servers, so april does not know "
                "which weights made their tokens; pause before the weights change, and resume afterwards"
            )
        self.deliveries.report_weights(self.scheduler, label)
        if not self._continuous and last is not None:
            self.scheduler.commit(last)
        batch = self.scheduler.next_batch()
        if not self._continuous:
            self._abort_remaining()
        groups = groupby(batch.samples, key=lambda row: row.id.group)
        joined = [self._joined([*rows]) for _, rows in groups]
        return joined, self.deliveries.metrics(batch, self.scheduler.ledger())

    def _abort_remaining(self) -> None:
        """End all requests at the servers if there are any; AReaL's servers cannot end single requests."""
        if self._servers.busy:
            self._end_all()

    def pause(self) -> None:
        """End april's requests at the servers and send none until :meth:`resume`."""
        self.scheduler.pause()
        self._abort_remaining()

    def resume(self, label: int) -> None:
        """Send requests again; ``label`` is the trainer's version number of the weights that the servers hold."""
        self.deliveries.report_weights(self.scheduler, label)
        self.scheduler.resume()

    def close(self) -> None:
        """Close the scheduler; unfinished samples that are in no checkpoint are lost."""
        self.scheduler.close()

    def _joined(self, rows: Sequence[DeliveredSample]) -> Trajectory:
        """Join a group's trajectories and apply april's loss masks. ``rows`` are the conversations of its samples."""
        kept = [row for row in rows if row.output[0] is not None]
        samples = {row.id: row.output[0] for row in kept}
        group = self._join([*samples.values()])
        for number, row in enumerate(kept):
            if not is_masked(row):
                continue
            if not len(group["loss_mask"]) == len(samples) == len(kept):
                raise RolloutError(
                    f"tokens of prompt {row.id.group} are older than max_head_offpolicyness, and its workflow returns "
                    "several rows per sample, so april cannot exclude them from the loss; set april={'on_stale': "
                    "'drop'}"
                )
            mask, at = row.loss_mask, len(row.prompt.token_ids)
            group["loss_mask"][number, at : at + len(mask)] *= group["loss_mask"].new_tensor(mask)
        return group

    # ---------------------------------------------------------------- on the scheduler's event loop

    async def _rollout(self, prompt: Prompt, llm: LLM) -> list[Trajectory | None]:
        CURRENT_LLM.set(llm)
        try:
            return [await self._episode(prompt.data["row"])]
        finally:
            self._servers.forget(llm.sample_id)

    async def _keep(self, prompt: Prompt, responses: Sequence[Response]) -> bool:
        """Return True if a group is to be trained; called once all of its samples are finished."""
        kept = [response.output[0] for response in responses if response.output[0] is not None]
        if not kept:
            return False
        joined = self._join(kept)
        return self._accepts is None or bool(self._accepts(joined))

    # ---------------------------------------------------------------- checkpoints

    def save(self, path: Path, loader_state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Write april's state to ``path`` and return the loader's state of that moment.

        All delivered batches count as trained. Raises CheckpointError if a prompt or trajectory cannot be saved.
        """
        state = self.scheduler.state_dict(self.deliveries.last)
        theirs, ahead = self.prompts.carried.save(state["prompts"]["position"], loader_state)
        outputs = {(group, index) for group, index, _ in state.get("outputs", ())}
        ready = state["core"]["ready"]
        finished = {(g["id"], i) for g in ready for i, sample in enumerate(g["samples"]) if sample.get("finished")}
        try:
            if finished - outputs:
                raise CheckpointError("a trajectory is not made of tensors, arrays, numbers, text, lists and mappings")
            for group in saved_groups(state):
                group["data"] = plain(group["data"], "a prompt")
            ahead = plain(ahead, "prompts")
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; let the data set return such values, or set recover.mode to disabled"
            ) from None
        content = {"state": state, "late": self._servers.late_responses(), "ahead": ahead, "epoch": self.prompts.epoch}
        write_state(path, KIND, content)
        return theirs

    def restore(self, path: Path) -> None:
        """Restore a saved state before the first batch. Raises CheckpointError if it is damaged or does not fit."""
        content = read_state(path, KIND)
        with checkpoint_errors(f"april's state in {path}"):
            state = content["state"]
            for group in saved_groups(state):
                group["data"] = restored(group["data"])
            self.prompts.epoch = content["epoch"]
            self.prompts.carried.restore(state["prompts"]["position"], restored(content["ahead"]))
            self._servers.restore(content["late"])
        self.scheduler.load_state_dict(state)  # the trainer has already loaded the weights
