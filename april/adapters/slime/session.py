"""A training run of slime: a scheduler over its data source, a batch per rollout, the carry at every checkpoint.

Invariant: stepwise, no request of april's is at any server between two calls of :meth:`Session.rollout`, so slime may
offload its engines and change their weights as it likes. With continuous generation none is from the moment at which
slime has paused its servers until its update is over.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import groupby, islice
from typing import Any

from april.adapters.slime.arguments import agent_path, config_of, router_url, warn_of
from april.adapters.slime.framework import Framework
from april.adapters.slime.functions import FunctionEngine
from april.adapters.slime.hooks import SlimeHooks
from april.adapters.slime.images import SampleImages
from april.adapters.slime.samples import (
    KIND,
    Groups,
    Held,
    as_dict,
    carry_path,
    finish,
    further,
    id_of,
    key_of,
    method_of,
    with_sample,
    without_experts,
    without_objects,
)
from april.adapters.slime.servers import FollowedUpdates, Weights
from april.core.batch import Batch, DeliveredSample
from april.core.types import GenerationMode
from april.core.versions import PolicyVersion
from april.driver.llm import single_turn
from april.driver.user_code import check_function
from april.engines.protocol import Engine
from april.errors import CheckpointError, ConfigError
from april.kept_samples import KeptSamples
from april.scheduler import RolloutScheduler
from april.state_file import groups_in, read_state, write_state

log = logging.getLogger("april")

STEADY_S = 0.05
STEADY_TRIES = 200
"""A prompt that is being drawn while slime saves is waited for."""
NAMED_BATCHES = 16
"""So many rollouts are remembered by name."""


class Session:
    """The state that lives as long as slime's data source.

    Args:
        args: slime's namespace; that of the first call counts.
        engines: engine objects instead of slime's SGLang servers.
        tokenizer: instead of that of ``--hf-checkpoint``.
        check: cross-check april's books after every event.
    """

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
        """april's rollout function, which may hold several conversations."""
        if self._agent is not None:
            check_function("april.rollout", self._agent, ("prompt", "llm"))
        if tokenizer is None:
            load = framework.get("utils.processing_utils.load_tokenizer")
            tokenizer = load(args.hf_checkpoint, trust_remote_code=True)
        self._tokenizer = tokenizer
        self._check = check
        self._images: SampleImages | None = None
        self._batches: dict[int, int] = {}
        """Batch of each rollout that may still be named by a checkpoint."""
        self._leased: dict[int, Held] = {}
        """Samples by batch, oldest first: delivered, and not known to be trained on."""
        router = None if engines is not None else router_url(args)
        # april's own engines write their labels; a custom generate function leaves slime's
        self._weights = Weights(router, rollout_id, relabels=self._function is None)
        self._open(self._saved(rollout_id))
        self._weights.name(self.scheduler.version, rollout_id)
        if hasattr(data_source, "save"):
            self._hook_save()

    # ---------------------------------------------------------------- one rollout

    def rollout(self, rollout_id: int, weight_version: int | None = None) -> Any:
        """N groups of n samples, as slime's own function returns them; with a quorum N * n, in parts of groups.

        ``weight_version``: of the servers, where the trainer says it.
        """
        with nullcontext() if self._followed is None else self._followed.caught_up():
            self._follow_weights(rollout_id, weight_version)
        self._hooks.begin()
        batch = self.scheduler.next_batch()
        self._batches[rollout_id] = batch.id
        while len(self._batches) > NAMED_BATCHES:
            del self._batches[min(self._batches)]
        groups = self._groups_of(batch)
        self._kept.settle(self.scheduler.held_groups())
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
        seen: dict[tuple[str, ...], Any] = {}
        for size in batch.group_sizes:
            group: list[Any] = []
            for sample_id, rows in groupby(islice(done, size), key=lambda row: row[0].id):
                (first, advantage), *others = rows
                # never in neither of the two: a checkpoint may be written at this moment
                sample = leased[sample_id] = self._hooks.held[sample_id]
                del self._hooks.held[sample_id]
                if self._finished is not None:
                    self._finished.pop(sample_id, None)
                if self._agent is not None and sample.rollout_id is None:
                    sample.rollout_id = sample.index  # by which slime counts the rows of a response once
                made = [(further(sample, row, self._text(row)), row) for row, _ in others]
                for one, row in [(sample, first), *made]:
                    group.append(finish(one, row, batch.version, self._weights.names, advantage, mask_offpolicy=mask))
                    if self._images is not None:
                        self._images.finish(one, row, seen)
            groups.append(group)
        return sorted(groups, key=lambda group: group[0].index)

    def _text(self, row: DeliveredSample) -> str:
        return str(self._tokenizer.decode(row.tokens.tolist(), self._args.rollout_skip_special_tokens))

    def _follow_weights(self, rollout_id: int, weight_version: int | None) -> None:
        """Take over what the trainer has done to servers and weights since the last call."""
        before = self._weights.urls
        updated = self._weights.updated(rollout_id, weight_version)
        if self._weights.urls != before:
            self._move(before)
        elif updated:
            version = self._update(lambda: None)
            self._weights.name(version, rollout_id)
            return
        else:
            return
        self._weights.name(self.scheduler.version, rollout_id)

    def _update(self, until_there: Callable[[], None]) -> PolicyVersion:
        """april pauses; once the weights are there, it has caches emptied and writes its own label."""
        trained = self._trained()
        version = self.scheduler.weight_update(transfer=until_there, trained=trained)
        for batch in [b for b in self._leased if trained is not None and b <= trained]:
            del self._leased[batch]
        return version

    def _trained(self) -> int | None:
        """The last batch that an update was trained on: an asynchronous trainer has asked for one more before it."""
        out = list(self._leased)
        return max(out[:-1] or out, default=None)

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
        self._followed: FollowedUpdates | None = None
        try:
            if saved is not None:
                self._restore(saved)
            if config.generation is GenerationMode.CONTINUOUS:
                if framework.name != "slime":
                    raise ConfigError(
                        f"april.generation=continuous was not tried with {framework.name}; leave it out"
                    )
                self._followed = FollowedUpdates(
                    self.scheduler.engines, self._weights, self._update,
                    lambda version: self._weights.name(version, self._weights.next_rollout),
                )  # fmt: skip
        except BaseException:
            self.scheduler.close()
            raise
        warn_of(args, config)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _move(self, before: Sequence[str]) -> None:
        """slime has started servers anew, at other addresses: a new scheduler goes on from the old one's books."""
        log.warning("the servers have changed from %s to %s", ", ".join(before), ", ".join(self._weights.urls))
        saved = self._content(max(self._batches.values(), default=None))
        self.close()
        self._leased.clear()
        self._open(saved)

    def close(self) -> None:
        """End the scheduler; what it held and no checkpoint has is gone."""
        if self._followed is not None:
            self._followed.end()
        self.scheduler.close()
        if self._followed is not None:
            self._followed.join()

    # ---------------------------------------------------------------- checkpoints

    def _hook_save(self) -> None:
        save: Callable[[int], Any] = self._data_source.save

        def both(rollout_id: int) -> None:
            self.save(rollout_id, save)

        self._data_source.save = both

    def save(self, rollout_id: int, save: Callable[[int], Any]) -> None:
        """Write slime's own file by ``save``, and april's beside it, of the same moment; raises CheckpointError."""
        directory = getattr(self._args, "save", None)
        if directory is None:
            save(rollout_id)
            return
        through = max((b for r, b in self._batches.items() if r <= rollout_id), default=None)
        content = self._content(through, lambda: save(rollout_id))
        # servers without labels: each rollout counts as an update, also one that an asynchronous trainer has asked for
        # before it was through with this one; the saved weights are one update ahead of what was counted
        if through is not None and through not in self._leased:
            content["lag"] = 1
        write_state(carry_path(directory, rollout_id), KIND, content)

    def _content(self, trained_through: int | None, write: Callable[[], Any] = lambda: None) -> dict[str, Any]:
        """Return what a checkpoint needs, of the moment when ``write`` wrote slime's own part of it."""
        groups = self._groups
        for _ in range(STEADY_TRIES):
            drawn, begun = groups.drawn, groups.begun
            write()
            state = self.scheduler.state_dict(trained_through)
            if state["prompts"]["position"] == drawn == begun == groups.begun == groups.drawn:
                break
            threading.Event().wait(STEADY_S)
        else:
            raise CheckpointError(f"the data source has been giving one prompt for {STEADY_S * STEADY_TRIES:g} s")
        inside = groups_in(state)
        held = self._hooks.held.copy()
        for leased in list(self._leased.values()):
            held |= leased if self._function is not None else {i: without_experts(s) for i, s in leased.items()}
        theirs = self._function is not None  # april has none of the images of samples that a function fills
        kept = {"held": held, "finished": (self._finished or {}).copy()}
        return {
            "state": without_objects(state),
            "lag": 0,
            "names": [[*version, *name] for version, name in self._weights.names.items()],
            "ahead": [[as_dict(s, images=True) for s in group] for group in self._groups.ahead],
            **{
                what: {key_of(i): as_dict(s, images=theirs) for i, s in samples.items() if i.group in inside}
                for what, samples in kept.items()
            },
        }

    def _saved(self, rollout_id: int) -> dict[str, Any] | None:
        directory = getattr(self._args, "load", None)
        if directory is None or rollout_id == 0:
            return None
        path = carry_path(directory, rollout_id - 1)
        if not path.exists():
            log.warning(
                "rollout %d goes on from a checkpoint that april has not written (there is no %s): what was unfinished "
                "then is lost, and its prompts are not asked again in this epoch", rollout_id, path,
            )  # fmt: skip
            return None
        return read_state(path, KIND)

    def _restore(self, saved: dict[str, Any]) -> None:
        try:
            self._groups.go_on(saved["state"]["prompts"]["position"], saved["ahead"])
            lag = int(saved["lag"])
            self._weights.names = {PolicyVersion(i, n): (label, began) for i, n, label, began in saved["names"]}
            for kept, key in ((self._hooks.held, "held"), (self._finished, "finished")):
                if kept is not None:
                    kept.update({id_of(k): self._groups.sample(s) for k, s in saved[key].items()})
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"april's carry is damaged: {type(error).__name__}: {error}") from error
        self.scheduler.load_state_dict(saved["state"], transfer=lambda: None)  # slime has put the weights there
        for _ in range(lag):
            self.scheduler.weight_update(transfer=lambda: None)
