"""slime's samples on both sides: groups of its data source become prompts, rows of a batch become samples.

Invariant: a group that the data source has given is in april's books, or in ``ahead``; there is no third place.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from april.adapters.slime.images import INPUTS, TRAIN_INPUTS, SampleImages, as_bytes, as_images, images_of, take_out
from april.core.batch import DeliveredSample
from april.core.tape import Int32, Segment, SegmentKind
from april.core.types import FinishReason, Prompt, SampleId
from april.core.versions import PolicyVersion
from april.corrections.advantages import Method
from april.driver.llm import LLM
from april.driver.user_code import is_async
from april.engines.protocol import ROUTED_EXPERTS
from april.errors import ConfigError, RolloutError

HOOK = "april.adapters.slime.post_process_rewards"
SCALED, CENTRED = ("grpo", "gspo", "cispo"), ("reinforce_plus_plus_baseline",)
"""``--advantage-estimator`` whose rewards slime divides by the deviation in their group, and those it only centres."""


def method_of(args: Any) -> Method | None:
    """April's name of what slime makes of a group's rewards by its flags; None: it leaves them as they are."""
    estimator = getattr(args, "advantage_estimator", "grpo")
    if estimator not in SCALED + CENTRED or not getattr(args, "rewards_normalization", True):
        return None
    return "grpo" if estimator in SCALED and getattr(args, "grpo_std_normalization", True) else "dr_grpo"


def post_process_rewards(args: Any, samples: Sequence[Any], **kwargs: Any) -> tuple[list[float], list[float]]:
    """Return raw rewards and advantages of delivered samples; for whole groups the advantages are slime's own.

    Raises RolloutError for samples that april has not delivered.
    """
    raw = [sample.get_reward_value(args) for sample in samples]
    if method_of(args) is None:
        return raw, raw
    try:
        return raw, [sample.metadata["april"]["advantage"] for sample in samples]
    except (KeyError, TypeError):
        raise RolloutError(
            f"--custom-reward-post-process-path {HOOK} got a sample that april has not delivered; it goes with "
            "--rollout-function-path april.adapters.slime.generate_rollout"
        ) from None


log = logging.getLogger("april")

Names = Mapping[PolicyVersion, tuple[str, int]]
"""Slime's name for the weights of a version, and the rollout that began under it."""


class Groups:
    """The groups of the data source, one after the other, as april's prompts.

    Args:
        data_source: with ``get_samples(k)``, as slime's.
        n: samples per group.
        encode: text to token ids.
        check: raises for a sample that april cannot use.
        any_prompt: who generates reads the prompt itself; its token ids here are for the books.
        images: of samples that have some; None: there are to be none.
    """

    resumes = True
    """slime's data source goes on by its own checkpoint."""

    def __init__(
        self, data_source: Any, n: int, encode: Callable[[str], Sequence[int]], check: Callable[[Any], None], *,
        any_prompt: bool = False, images: SampleImages | None = None,
    ) -> None:  # fmt: skip
        self._data_source = data_source
        self._images = images
        self._n = n
        self._encode = encode
        self._check = check
        self._any_prompt = any_prompt
        self._type: Any = None
        self._told = False
        self.begun = self.drawn = 0
        """Groups that were asked for, and handed out; those before a restart included."""
        self.ahead: list[Any] = []
        """Groups that the data source has given and nobody has asked for."""

    def __iter__(self) -> Groups:
        return self

    def __next__(self) -> Any:
        self.begun += 1
        try:
            group = self.ahead[0] if self.ahead else self._draw()
            prompt = {"token_ids": self._prompt_ids(group), "group": group, **self._with_images(group)}
            if self.ahead:
                self.ahead.pop(0)
            self.drawn += 1
        finally:
            self.begun = self.drawn
        return prompt

    def go_on(self, drawn: int, ahead: list[Any]) -> None:
        """As before a restart."""
        self.begun = self.drawn = drawn
        self.ahead = ahead

    def sample(self, entry: Any) -> Any:
        """A sample to write into: a copy of one that was drawn, or one made of what was saved."""
        if not isinstance(entry, Mapping):
            return copy.deepcopy(entry)
        if self._type is None:  # nothing was drawn since the restart
            self.ahead.append(self._draw())
        return self._type.from_dict(unpacked(entry))

    def begin(self, prompt: Prompt, sample_id: SampleId) -> Any:
        """Return a sample to write into, without a response; the index of one that replaces another is below zero.

        miles counts samples of the same index once.
        """
        group = prompt.data["group"]
        sample = self.sample(group[sample_id.index % len(group)])
        if self._images is not None:
            self._images.put_back(sample, prompt.attached)
        if sample_id.index >= len(group):
            sample.index = -1 - sample.index
            if getattr(sample, "rollout_id", None) is not None:
                sample.rollout_id = sample.index
        return sample

    def _draw(self) -> list[Any]:
        groups = self._data_source.get_samples(1)
        if not groups:
            raise StopIteration
        (group,) = groups
        if len(group) != self._n:
            raise RolloutError(
                f"the data source gave a group of {len(group)} samples, and --n-samples-per-prompt is {self._n}"
            )
        if self._type is None:
            self._check(group[0])
            self._type = type(group[0])
        if group[0].response_length and not self._told:
            self._told = True
            log.warning("samples of the data source come with a response; april does not know how it came about and "
                        "generates it anew")  # fmt: skip
        return list(group)

    def _first(self, group: Sequence[Any]) -> Any:
        """To be read only."""
        return self.sample(group[0]) if isinstance(group[0], Mapping) else group[0]

    def _with_images(self, group: Sequence[Any]) -> dict[str, Any]:
        """The images of a prompt, which its samples lose."""
        if self._any_prompt:
            return {}
        sample = self._first(group)
        images = images_of(sample)
        if images and self._images is None:
            raise ConfigError(
                f"sample {sample.index} has images, and nothing says that the data set has some; name their column in "
                "--multimodal-keys"
            )
        take_out(group)
        return {"images": images} if images else {}

    def _prompt_ids(self, group: Sequence[Any]) -> Sequence[int]:
        sample = self._first(group)
        ids = sample.tokens[: len(sample.tokens) - sample.response_length]
        if ids:
            return list(ids)
        if self._any_prompt:
            return self._encode(str(sample.prompt)) or [0]
        if not isinstance(sample.prompt, str):
            raise ConfigError(f"the prompt of sample {sample.index} is no text; add --apply-chat-template")
        return self._encode(sample.prompt)


def fill(
    sample: Any, prompt_ids: Int32, tokens: Int32, logprobs: Any, mask: Any, finish: FinishReason, text: str
) -> Any:
    """Write a finished response into a fresh sample; the reward is still to come."""
    sample.tokens = prompt_ids.tolist() + tokens.tolist()
    sample.response = text
    sample.response_length = len(tokens)
    sample.rollout_log_probs = logprobs.tolist()
    sample.loss_mask = mask.tolist()
    sample.reward = None
    sample.status = sample.Status.COMPLETED if finish is FinishReason.STOP else sample.Status.TRUNCATED
    return sample


def further(sample: Any, row: DeliveredSample, text: str) -> Any:
    """A sample for one more conversation of a response, whose first one ``sample`` has: they share its reward."""
    made = fill(copy.deepcopy(sample), row.prompt.token_ids, row.tokens, row.logprobs, row.loss_mask, row.finish, text)
    made.reward = copy.deepcopy(sample.reward)
    return made


def finish(
    sample: Any, delivered: DeliveredSample, version: PolicyVersion, names: Names, advantage: float | None, *,
    mask_offpolicy: bool,
) -> Any:  # fmt: skip
    """Write provenance, advantage (None: its trainer uses none) and loss mask into a sample that is delivered.

    ``version`` is that of the present weights. ``mask_offpolicy`` takes the loss off tokens of a continued response
    that are of older weights than its last ones; a response that one version wrote keeps its mask, however old that
    version is.
    """
    mask = delivered.loss_mask.astype(bool)
    spans = spans_of(delivered.segments)
    generated = [v for _, _, v in spans if v is not None]
    if mask_offpolicy and generated:
        for start, end, v in spans:
            if v is not None and v < max(generated):
                mask[start:end] = False
    was = sample.loss_mask
    if was is None:
        was = [1] * sample.response_length
    if len(was) == len(mask):  # a hook may have rewritten the response
        sample.loss_mask = (np.asarray(was, bool) & mask).astype(int).tolist()
    sample.weight_versions = [names[v][0] if v in names else str(v) for v in generated]
    oldest = min(generated, default=version)
    provenance: dict[str, Any] = {
        "spans": [[start, end, None if v is None else str(v)] for start, end, v in spans],
        "version": str(version), "staleness": delivered.staleness, "resumes": delivered.resumes,
    }  # fmt: skip
    if advantage is not None:
        provenance["advantage"] = advantage
    # the trainer's conversion takes this along with the tokens, and leaves metadata behind
    sample.train_metadata = {**(getattr(sample, "train_metadata", None) or {}), "april": provenance}
    metadata = {**(sample.metadata or {}), "april": provenance}
    if oldest != version and oldest in names:
        metadata.setdefault("start_rollout_id", names[oldest][1])
    sample.metadata = metadata
    add_experts(sample, delivered)
    return sample


def add_experts(sample: Any, delivered: DeliveredSample) -> None:
    """Write the experts that are to be replayed, int32 [tokens - 1, layers, experts per token], if they were asked for.

    Raises RolloutError where a hook has put other tokens into the sample.
    """
    rows = delivered.extras.get(ROUTED_EXPERTS)
    if rows is None:
        return
    if len(sample.tokens) != len(rows) + 1:
        raise RolloutError(
            f"sample {sample.index} has {len(sample.tokens)} tokens, and {len(rows) + 1} were generated or read: a "
            "hook has rewritten the response, whose experts --use-rollout-routing-replay would replay"
        )
    setattr(sample, EXPERTS, rows.astype(np.int32))


def spans_of(segments: Sequence[Segment]) -> list[tuple[int, int, PolicyVersion | None]]:
    """[start, end) of the response and the version that wrote it (None: the environment), attempts joined."""
    spans: list[tuple[int, int, PolicyVersion | None]] = []
    for s in segments:
        version = s.version if s.kind is SegmentKind.GENERATED else None
        if spans and spans[-1][2] == version:
            spans[-1] = (spans[-1][0], s.start + s.count, version)
        else:
            spans.append((s.start, s.start + s.count, version))
    return spans


Held = dict[SampleId, Any]
"""Samples that are not delivered yet, by name."""


KIND = "slime"


def carry_path(directory: str, rollout_id: int) -> Path:
    """The path of april's part of a checkpoint, beside what slime's data source writes for this rollout."""
    return Path(directory) / "rollout" / f"april_carry_{rollout_id}.msgpack"


def without_objects(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state of the scheduler in which the samples of prompts are plain."""
    core = dict(state["core"])
    for key in ("ready", "waiting"):
        core[key] = [
            {**group, "data": {"group": [as_dict(s, images=True) for s in group["data"]["group"]]}}
            for group in core[key]
        ]
    return {**state, "core": core}


EXPERTS = "rollout_routed_experts"
"""The field of a sample that has the experts to be replayed."""


def as_dict(sample: Any, *, images: bool = False) -> dict[str, Any]:
    """A sample as plain values; those that come from a file are that already. ``images``: with those that it has."""
    if isinstance(sample, Mapping):
        return dict(sample)
    values = dict(sample.to_dict())
    if INPUTS in values:  # of what april holds they are in its own state
        values[INPUTS] = as_bytes(values[INPUTS]) if images else dict.fromkeys(values[INPUTS] or ()) or None
        values.pop(TRAIN_INPUTS, None)
    if (rows := values.get(EXPERTS)) is not None:  # a custom generate function's: an array, or lists, or a tensor
        rows = np.asarray(rows, "<i4")
        values[EXPERTS] = [list(rows.shape), rows.tobytes()]
    return values


def without_experts(sample: Any) -> Any:
    """A sample that is delivered again, for a file: its experts come with its tokens, which april's state has."""
    return {**as_dict(sample), EXPERTS: None} if getattr(sample, EXPERTS, None) is not None else sample


def unpacked(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a sample out of a file, as its ``from_dict`` takes them."""
    values = copy.deepcopy(dict(entry))
    if (rows := values.get(EXPERTS)) is not None:
        values[EXPERTS] = np.frombuffer(rows[1], "<i4").reshape(rows[0]).astype(np.int32)
    if INPUTS in values:
        values[INPUTS] = as_images(values[INPUTS])
    return values


def with_sample(function: Any, groups: Groups) -> Any:
    """A rollout function that is given slime's fields of its sample as the data of its prompt."""

    def given(prompt: Prompt, sample_id: SampleId) -> Prompt:
        sample = groups.begin(prompt, sample_id)
        data = {name: getattr(sample, name, None) for name in ("prompt", "label", "metadata", "index")}
        return replace(prompt, data=data)

    if not is_async(function):
        return lambda prompt, llm: function(given(prompt, llm.sample_id), llm)

    async def rollout(prompt: Prompt, llm: LLM) -> Any:
        return await function(given(prompt, llm.sample_id), llm)

    return rollout


def key_of(sample_id: SampleId) -> str:
    """A sample's name in the file."""
    return f"{sample_id.group}.{sample_id.index}"


def id_of(key: str) -> SampleId:
    """The sample that a name in the file means."""
    group, _, index = key.partition(".")
    return SampleId(int(group), int(index))
