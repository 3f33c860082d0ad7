"""Runs the rollouts of a slime training: opens april's scheduler, delivers a batch per rollout, saves april's state.

Invariant: no server has a request from april while slime updates weights. With the setting ``generation: stepwise``
there is no request between two calls of :meth:`SlimeRollouts.rollout`; with ``continuous`` there is none from the
moment when slime pauses its servers until its weight update ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import groupby, islice
from typing import Any

from april.adapters.common.deliveries import KeptSamples, checkpoint_errors, closing_on_error, saved_groups
from april.adapters.common.refusals import refuse
from april.adapters.slime.arguments import agent_path, config_of, router_url, warn_of
from april.adapters.slime.framework import Framework
from april.adapters.slime.functions import FunctionEngine
from april.adapters.slime.hooks import SlimeHooks
from april.adapters.slime.samples import (
    KIND,
    Groups,
    Held,
    SampleImages,
    as_dict,
    carry_path,
    finish,
    further,
    method_of,
    unpacked,
    with_sample,
)  # fmt: skip
from april.adapters.slime.servers import ServerWeights, SlimeUpdates
from april.core.attachments import Placed
from april.core.batch import Batch, DeliveredSample
from april.core.types import GenerationMode, SampleId
from april.driver.llm import single_turn
from april.driver.user_code import check_function
from april.engines.protocol import Engine
from april.errors import CheckpointError
from april.scheduler import RolloutScheduler
from april.serialization.state_file import read_state, write_state

log = logging.getLogger("april")

STEADY_S, STEADY_TRIES = 0.05, 200
"""Seconds between tries, and number of tries, to find a moment for a checkpoint at which no prompt is being drawn."""
NAMED_BATCHES = 16
"""Number of latest rollouts for which a checkpoint can still be written."""


class SlimeRollouts:
    """april's scheduler and state for one data source of slime; uses the flags (``args``) of the first call."""

    def __init__(
        self, args: Any, data_source: Any, framework: Framework, rollout_id: int, *,
        engines: Sequence[Engine] | None = None, tokenizer: Any = None, check: bool = False,
    ) -> None:  # fmt: skip
        framework.check()
        self._args, self._data_source, self._framework = args, data_source, framework
        self._own_engines = engines
        path = getattr(args, "custom_generate_function_path", None)
        self._function = framework.load_function(path) if path else None
        agent = agent_path(args)
        self._agent = framework.load_function(agent) if agent else None
        if self._agent is not None:
            check_function("april.rollout", self._agent, ("prompt", "llm"))
        if tokenizer is None:
            load = framework.get("utils.processing_utils.load_tokenizer")
            tokenizer = load(args.hf_checkpoint, trust_remote_code=True)
        self._tokenizer = tokenizer
        self._check = check
        self._images: SampleImages | None = None
        self._batches: dict[int, int] = {}
        """Id of the batch that each rollout returned, by rollout id; needed for checkpoints."""
        self._leased: dict[int, Held] = {}
        """Delivered samples that may not be trained yet, by batch id, oldest batch first."""
        router = None if engines is not None else router_url(args)
        # april's engines set their own weight labels; with a custom generate function slime's labels stay
        self._weights = ServerWeights(router, rollout_id, relabels=self._function is None)
        self._open(self._saved(rollout_id))
        self._weights.note_update()
        if hasattr(data_source, "save"):
            save = data_source.save
            data_source.save = lambda rollout_id: self.save(rollout_id, save)

    # ---------------------------------------------------------------- one rollout

    def rollout(self, rollout_id: int) -> Any:
        """Return the next batch as groups of slime's samples.

        With ``group_quorum`` below 1, groups may be incomplete, but the number of samples is the same.
        """
        with nullcontext() if self._followed is None else self._followed.caught_up():
            self._follow_weights(rollout_id)
        self._hooks.begin()
        batch = self.scheduler.next_batch()
        self._batches[rollout_id] = batch.id
        while len(self._batches) > NAMED_BATCHES:
            del self._batches[min(self._batches)]
        groups = self._groups_of(batch)
        self._kept.forget_dropped(self.scheduler.held_groups())
        dropped, judged = self._hooks.drain()
        args, load = self._args, self._framework.load_function
        if getattr(args, "rollout_sample_filter_path", None):
            load(args.rollout_sample_filter_path)(args, groups)
        if getattr(args, "rollout_all_samples_process_path", None):
            load(args.rollout_all_samples_process_path)(args, judged, self._data_source)
        metrics: dict[str, Any] = {f"rollout/april/{name}": value for name, value in batch.metrics.items()}
        metrics |= {f"rollout/dynamic_filter/drop_{reason}": n for reason, n in dropped.items()}
        return self._framework.get("rollout.base_types.RolloutFnTrainOutput")(samples=groups, metrics=metrics)

    def _groups_of(self, batch: Batch) -> list[list[Any]]:
        method = method_of(self._args)
        advantages = batch.advantages(method, ddof=1).tolist() if method is not None else [None] * len(batch)
        done = zip(batch.samples, advantages, strict=True)
        mask = bool(getattr(self._args, "mask_offpolicy_in_partial_rollout", False))
        groups: list[list[Any]] = []
        leased = self._leased.setdefault(batch.id, {})
        seen: dict[tuple[Placed, ...], Any] = {}
        for size in batch.group_sizes:
            group: list[Any] = []
            for sample_id, rows in groupby(islice(done, size), key=lambda row: row[0].id):
                (first, advantage), *others = rows
                # another thread may write a checkpoint now, so the sample is never absent from both tables
                sample = leased[sample_id] = self._hooks.held[sample_id]
                del self._hooks.held[sample_id]
                if self._finished is not None:
                    self._finished.pop(sample_id, None)
                if self._agent is not None and sample.rollout_id is None:
                    sample.rollout_id = sample.index  # slime recognises the rows of one response by this id
                made = [(further(sample, row, self._text(row)), row) for row, _ in others]
                for one, row in [(sample, first), *made]:
                    group.append(finish(one, row, batch.version, advantage, mask_offpolicy=mask))
                    if self._images is not None:
                        self._images.finish(one, row, seen)
            groups.append(group)
        return sorted(groups, key=lambda group: group[0].index)

    def _text(self, row: DeliveredSample) -> str:
        return str(self._tokenizer.decode(row.tokens.tolist(), self._args.rollout_skip_special_tokens))

    def _follow_weights(self, rollout_id: int) -> None:
        """Tell april about servers and weights that have changed since the last rollout."""
        before = self._weights.urls
        updated = self._weights.updated(rollout_id)
        if moved := self._weights.urls != before:
            self._move(before)
        elif updated:
            self._update(lambda: None)
        if moved or updated:
            self._weights.note_update()

    def _update(self, until_there: Callable[[], None]) -> None:
        """Pause generation, wait for new weights by calling ``until_there``, and continue with a new policy version."""
        out = list(self._leased)
        trained = max(out[:-1] or out, default=None)  # asynchronous trainers have not trained the newest batch yet
        self.scheduler.weight_update(transfer=until_there, trained=trained)
        for batch in [b for b in self._leased if trained is not None and b <= trained]:
            del self._leased[batch]

    # ---------------------------------------------------------------- the scheduler

    def _open(self, saved: dict[str, Any] | None) -> None:
        args, framework = self._args, self._framework
        config = config_of(args, self._weights.urls or None, own_function=self._function is not None)
        if self._images is None and self._function is None:
            self._images = SampleImages.of(framework, args)
        groups = self._groups = Groups(
            self._data_source, args.n_samples_per_prompt, self._encode, framework.check_sample,
            any_prompt=self._function is not None, images=self._images,
        )  # fmt: skip
        self._finished: Held | None = None
        engines, rollout = self._own_engines, single_turn
        engine_keeps: tuple[Held, ...] = ()
        if self._function is not None:
            self._finished = {}
            engine = FunctionEngine(args, framework, self._function, groups, self._finished, self._weights.urls)
            engines, rollout, engine_keeps = [engine], engine.rollout, engine.kept
        elif self._agent is not None:
            rollout = with_sample(self._agent, groups)
        hooks = self._hooks = SlimeHooks(args, framework, groups, self._finished)
        self._kept = KeptSamples(hooks.held, *engine_keeps)
        in_groups = bool(getattr(args, "group_rm", False))
        self.scheduler = RolloutScheduler(
            config, prompts=groups, engines=engines, rollout=rollout, tokenizer=self._tokenizer, check=self._check,
            reward=None if in_groups else hooks.reward, group_reward=hooks.group_reward if in_groups else None,
            filter=hooks.filter if hooks.has_filter else None,
            processor=None if self._images is None else self._images.processor,
        )  # fmt: skip
        self._followed: SlimeUpdates | None = None
        with closing_on_error(self.scheduler.close):
            if saved is not None:
                self._restore(saved)
            if config.generation is GenerationMode.CONTINUOUS:
                other, name = framework.name != "slime", framework.name
                refuse([(other, "april.generation=continuous", f"it was not tested with {name}", "leave it out")])
                self._followed = SlimeUpdates(self.scheduler.engines, self._weights, self._update)
        warn_of(args, config)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _move(self, before: Sequence[str]) -> None:
        """Open a scheduler for the servers' new addresses, which continues from the old scheduler's state."""
        log.warning("the servers have changed from %s to %s", ", ".join(before), ", ".join(self._weights.urls))
        saved = self._content(max(self._batches.values(), default=None))
        self.close()
        self._leased.clear()
        self._open(saved)

    def close(self) -> None:
        """Close the scheduler; unfinished samples that are in no checkpoint are lost."""
        if self._followed is not None:
            self._followed.end()
        self.scheduler.close()
        if self._followed is not None:
            self._followed.join()

    # ---------------------------------------------------------------- checkpoints

    def save(self, rollout_id: int, save: Callable[[int], Any]) -> None:
        """Write slime's file with ``save``, and april's state of the same moment beside it. Raises CheckpointError."""
        directory = getattr(self._args, "save", None)
        if directory is None:
            save(rollout_id)
            return
        through = max((b for r, b in self._batches.items() if r <= rollout_id), default=None)
        content = self._content(through, lambda: save(rollout_id))
        # Without weight labels each rollout counts as an update, even if an asynchronous trainer asks for it early. The
        # saved weights are then one update newer than april's policy version, which _restore corrects.
        if through is not None and through not in self._leased:
            content["lag"] = 1
        write_state(carry_path(directory, rollout_id), KIND, content)

    def _content(self, trained_through: int | None, write: Callable[[], Any] = lambda: None) -> dict[str, Any]:
        """Return april's state at the moment when ``write`` writes slime's part of the checkpoint."""
        groups = self._groups
        for _ in range(STEADY_TRIES):
            drawn, begun = groups.drawn, groups.begun
            write()
            state = self.scheduler.state_dict(trained_through)
            if state["prompts"]["position"] == drawn == begun == groups.begun == groups.drawn:
                break
            threading.Event().wait(STEADY_S)
        else:
            raise CheckpointError(f"the data source has returned the same prompt for {STEADY_S * STEADY_TRIES:g} s")
        inside = {group["id"] for group in saved_groups(state)}
        custom = self._function is not None  # then april's own state lacks the images and routed experts of samples

        def plain(samples: Held, *, experts: bool = True) -> list[list[Any]]:
            rows = [(i, s) for i, s in samples.copy().items() if i.group in inside]
            return [[*i, as_dict(s, images=custom, experts=experts)] for i, s in rows]

        held = plain(self._hooks.held)
        for leased in list(self._leased.values()):
            held += plain(leased, experts=custom)
        for group in saved_groups(state):
            group["data"] = {"group": [as_dict(s, images=True) for s in group["data"]["group"]]}
        ahead = [[as_dict(s, images=True) for s in group] for group in self._groups.ahead]
        return {"state": state, "lag": 0, "ahead": ahead, "held": held, "finished": plain(self._finished or {})}

    def _saved(self, rollout_id: int) -> dict[str, Any] | None:
        directory = getattr(self._args, "load", None)
        if directory is None or rollout_id == 0:
            return None
        path = carry_path(directory, rollout_id - 1)
        if not path.exists():
            log.warning(
                "rollout %d continues from a checkpoint that april did not write (there is no %s): unfinished "
                "responses are lost, and their prompts are not used again in this epoch", rollout_id, path,
            )  # fmt: skip
            return None
        return read_state(path, KIND)

    def _restore(self, saved: dict[str, Any]) -> None:
        from_dict, state = self._framework.get("utils.types.Sample").from_dict, saved["state"]

        def samples(entries: Sequence[Any]) -> list[Any]:
            return [from_dict(unpacked(entry)) for entry in entries]

        with checkpoint_errors("april's carry"):
            self._groups.restore(state["prompts"]["position"], [samples(group) for group in saved["ahead"]])
            for group in saved_groups(state):
                group["data"] = {"group": samples(group["data"]["group"])}
            lag = int(saved["lag"])
            for kept, key in ((self._hooks.held, "held"), (self._finished, "finished")):
                if kept is not None:
                    kept |= {SampleId(group, index): from_dict(unpacked(s)) for group, index, s in saved[key]}
        self.scheduler.load_state_dict(state, transfer=lambda: None)  # slime has already loaded the weights
        for _ in range(lag):
            self.scheduler.weight_update(transfer=lambda: None)
