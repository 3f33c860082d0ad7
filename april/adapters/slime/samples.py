"""Converts groups of slime's data source to april's prompts, and delivered rows to slime's samples, with images.

Invariants: each group from the data source is either in april's state or in ``Groups.ahead``. While april holds a
sample, its images exist only once per group, as attachments of the prompt; the same is true in saved files.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from april.adapters.common.samples import NOT_TRAINED, attached_pictures, spans_of
from april.adapters.slime.framework import Framework
from april.core.attachments import Placed
from april.core.batch import DeliveredSample
from april.core.tape import Int32
from april.core.types import FinishReason, Prompt, SampleId
from april.core.versions import PolicyVersion
from april.corrections.advantages import Method
from april.driver.llm import LLM
from april.driver.user_code import is_async
from april.engines.protocol import ROUTED_EXPERTS
from april.errors import ConfigError, RolloutError

HOOK = "april.adapters.slime.post_process_rewards"
SCALED, CENTRED = ("grpo", "gspo", "cispo"), ("reinforce_plus_plus_baseline",)
"""Values of ``--advantage-estimator`` with which slime divides rewards by their deviation, or only centres them."""
INPUTS, TRAIN_INPUTS, EXPERTS = "multimodal_inputs", "multimodal_train_inputs", "rollout_routed_experts"
"""Fields of a sample: media of the data set, the processor's outputs for them, and routed experts for replay."""
KIND = "slime"
_CACHED_GROUPS = 16
"""Number of groups whose opened images are cached, because the samples of a group are scored one by one."""
Held = dict[SampleId, Any]
"""Samples that are not delivered yet, by id."""


def method_of(args: Any) -> Method | None:
    """Return april's name for slime's method of group advantages, or None if slime does not normalise rewards."""
    estimator = getattr(args, "advantage_estimator", "grpo")
    if estimator not in SCALED + CENTRED or not getattr(args, "rewards_normalization", True):
        return None
    return "grpo" if estimator in SCALED and getattr(args, "grpo_std_normalization", True) else "dr_grpo"


def post_process_rewards(args: Any, samples: Sequence[Any], **kwargs: Any) -> tuple[list[float], list[float]]:
    """Return (raw rewards, advantages) of delivered samples; for whole groups the advantages equal slime's own.

    Raises RolloutError for a sample that april has not delivered.
    """
    raw = [sample.get_reward_value(args) for sample in samples]
    if method_of(args) is None:
        return raw, raw
    try:
        return raw, [sample.metadata["april"]["advantage"] for sample in samples]
    except (KeyError, TypeError):
        raise RolloutError(
            f"--custom-reward-post-process-path {HOOK} got a sample that april has not delivered; it only works with "
            "--rollout-function-path april.adapters.slime.generate_rollout"
        ) from None


class Groups:
    """Iterates over the groups of slime's data source, in order, as april's prompts.

    ``check`` raises ConfigError for a sample that april cannot use. ``any_prompt`` is True if a custom function reads
    the prompt, whose token ids april then only records. ``images`` is None if samples have no images.
    """

    resumes = True
    """True tells april not to restore the position in the prompts: slime's data source does that itself."""

    def __init__(
        self, data_source: Any, n: int, encode: Callable[[str], Sequence[int]], check: Callable[[Any], None], *,
        any_prompt: bool = False, images: SampleImages | None = None,
    ) -> None:  # fmt: skip
        self._data_source, self._n, self._encode, self._check = data_source, n, encode, check
        self._any_prompt, self._images = any_prompt, images
        self._checked = False
        self.begun = self.drawn = 0
        """Number of groups that april has asked for, and number that it got, since the beginning of the run."""
        self.ahead: list[Any] = []
        """Groups that were read from the data source before a restart and that april has not drawn yet."""

    def __iter__(self) -> Groups:
        return self

    def __next__(self) -> Any:
        self.begun += 1
        try:
            group = self.ahead[0] if self.ahead else self._draw()
            prompt = {"token_ids": self._prompt_ids(group[0]), "group": group, **self._with_images(group)}
            if self.ahead:
                self.ahead.pop(0)
            self.drawn += 1
        finally:
            self.begun = self.drawn
        return prompt

    def restore(self, drawn: int, ahead: list[Any]) -> None:
        """Restore the position, and the groups that came from the data source but were not drawn."""
        self.begun = self.drawn = drawn
        self.ahead = ahead

    def begin(self, prompt: Prompt, sample_id: SampleId) -> Any:
        """Return a new sample without a response, for ``sample_id``.

        A sample that replaces another gets a negative index, because miles counts samples of equal index only once.
        """
        group = prompt.data["group"]
        sample = copy.deepcopy(group[sample_id.index % len(group)])
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
                f"the data source returned a group of {len(group)} samples, but --n-samples-per-prompt is {self._n}"
            )
        if not self._checked:
            self._check(group[0])
            self._checked = True
        return list(group)

    def _with_images(self, group: Sequence[Any]) -> dict[str, Any]:
        """Take the images out of a group's samples and return them as a field of the prompt."""
        if self._any_prompt:
            return {}
        images = images_of(group[0])
        if images and self._images is None:
            raise ConfigError(
                f"sample {group[0].index} has images, but no column of the data set is declared for them; name it in "
                "--multimodal-keys"
            )
        for sample in group:
            if given := getattr(sample, INPUTS, None):
                setattr(sample, INPUTS, dict.fromkeys(given))
        return {"images": images} if images else {}

    def _prompt_ids(self, sample: Any) -> Sequence[int]:
        ids = sample.tokens[: len(sample.tokens) - sample.response_length]
        if ids:
            return list(ids)
        if self._any_prompt:
            return self._encode(str(sample.prompt)) or [0]
        if not isinstance(sample.prompt, str):
            raise ConfigError(f"the prompt of sample {sample.index} is not text; add --apply-chat-template")
        return self._encode(sample.prompt)


def fill(
    sample: Any, prompt_ids: Int32, tokens: Int32, logprobs: Any, mask: Any, finish: FinishReason, text: str
) -> Any:
    """Write a finished response into a new sample and return it; the reward stays None."""
    sample.tokens = prompt_ids.tolist() + tokens.tolist()
    sample.response = text
    sample.response_length = len(tokens)
    sample.rollout_log_probs = logprobs.tolist()
    sample.loss_mask = mask.tolist()
    sample.reward = None
    sample.status = sample.Status.COMPLETED if finish is FinishReason.STOP else sample.Status.TRUNCATED
    return sample


def further(sample: Any, row: DeliveredSample, text: str) -> Any:
    """Make a sample for a further conversation (``row``) of the rollout that made ``sample``, with the same reward."""
    made = fill(copy.deepcopy(sample), row.prompt.token_ids, row.tokens, row.logprobs, row.loss_mask, row.finish, text)
    made.reward = copy.deepcopy(sample.reward)
    return made


def finish(
    sample: Any, delivered: DeliveredSample, version: PolicyVersion, advantage: float | None, *, mask_offpolicy: bool
) -> Any:
    """Write loss mask, policy versions and advantage of april's row into a sample of slime and return the sample.

    ``version`` is the current policy version. ``mask_offpolicy`` excludes tokens older than the sample's newest
    policy version from the loss. If a hook has rewritten the response, mask and versions are those of the tokens before
    the first changed one, and later tokens have no version.

    Raises RolloutError if a hook has rewritten the response before or among tokens that must be excluded.
    """
    mask = delivered.loss_mask.astype(bool)
    spans = spans_of(delivered.segments)
    generated = [v for _, _, v in spans if v is not None]
    if mask_offpolicy and generated:
        for start, end, v in spans:
            if v is not None and v < max(generated):
                mask[start:end] = False
    length = sample.response_length
    own = np.array([1] * length if sample.loss_mask is None else sample.loss_mask, bool)
    same = min(_unchanged(sample, delivered.tokens), len(own))
    if same < length and any(v is not None and not mask[max(start, same) : end].all() for start, end, v in spans):
        raise RolloutError(
            f"a hook has rewritten the response of sample {sample.index} from token {same} on, and later tokens are "
            "too old to be trained, so april cannot tell which ones to mask; let hooks change only loss_mask or the end"
        )
    own[:same] &= mask[:same]
    sample.loss_mask = own.astype(int).tolist()
    spans = [(start, min(end, same), v) for start, end, v in spans if start < same]
    if same < length:
        spans.append((same, length, None))
    sample.weight_versions = [str(v.n) for _, _, v in spans if v is not None]
    provenance: dict[str, Any] = {
        "spans": [[start, end, None if v is None else str(v)] for start, end, v in spans],
        "version": str(version), "staleness": delivered.staleness, "resumes": delivered.resumes,
    }  # fmt: skip
    if advantage is not None:
        provenance["advantage"] = advantage
    # slime sends train_metadata to the trainer together with the tokens, but does not send metadata
    sample.train_metadata = {**(getattr(sample, "train_metadata", None) or {}), "april": provenance}
    sample.metadata = {**(sample.metadata or {}), "april": provenance}
    add_experts(sample, delivered)
    return sample


def _unchanged(sample: Any, tokens: Int32) -> int:
    """Return the number of response tokens before the first one that a hook has changed, added or removed."""
    now = np.array(sample.tokens[len(sample.tokens) - sample.response_length :])
    count = min(len(now), len(tokens))
    return int(np.append(now[:count] != tokens[:count], True).argmax())


def add_experts(sample: Any, delivered: DeliveredSample) -> None:
    """Write the routed experts for replay, int32 [tokens - 1, layers, experts per token], if april has them.

    Raises RolloutError if a hook has changed the number of the sample's tokens.
    """
    rows = delivered.extras.get(ROUTED_EXPERTS)
    if rows is None:
        return
    if len(sample.tokens) != len(rows) + 1:
        raise RolloutError(
            f"sample {sample.index} has {len(sample.tokens)} tokens, but {len(rows) + 1} were generated or read: a "
            "hook has rewritten the response, whose experts --use-rollout-routing-replay would replay"
        )
    setattr(sample, EXPERTS, rows.astype(np.int32))


def carry_path(directory: str, rollout_id: int) -> Path:
    """Return the path of april's file, beside the file that slime's data source writes for this rollout."""
    return Path(directory) / "rollout" / f"april_carry_{rollout_id}.msgpack"


def as_dict(sample: Any, *, images: bool = False, experts: bool = True) -> dict[str, Any]:
    """Return a sample as plain values, with its images if ``images`` and with its routed experts if ``experts``."""
    values = dict(sample.to_dict())
    if INPUTS in values:  # april's prompts have the images already
        given = values[INPUTS]
        values[INPUTS] = dict.fromkeys(given or ()) or None
        if images and given is not None:
            values[INPUTS] = _with_images(given, _png)
        values.pop(TRAIN_INPUTS, None)
    if (rows := values.get(EXPERTS)) is not None:  # made by a custom generate function, as array, lists or tensor
        rows = np.asarray(rows, "<i4")
        values[EXPERTS] = [list(rows.shape), rows.tobytes()] if experts else None
    return values


def unpacked(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the result of :func:`as_dict` to the form that the sample's ``from_dict`` takes."""
    values = dict(entry)
    if (rows := values.get(EXPERTS)) is not None:
        values[EXPERTS] = np.frombuffer(rows[1], "<i4").reshape(rows[0]).astype(np.int32)
    if values.get(INPUTS) is not None:
        values[INPUTS] = _with_images(values[INPUTS], _opened)
    return values


def with_sample(function: Any, groups: Groups) -> Any:
    """Wrap a rollout function of april so that its ``prompt.data`` holds fields of slime's sample."""

    def given(prompt: Prompt, sample_id: SampleId) -> Prompt:
        sample = groups.begin(prompt, sample_id)
        data = {name: getattr(sample, name, None) for name in ("prompt", "label", "metadata", "index")}
        return replace(prompt, data=data)

    if not is_async(function):
        return lambda prompt, llm: function(given(prompt, llm.sample_id), llm)

    async def rollout(prompt: Prompt, llm: LLM) -> Any:
        return await function(given(prompt, llm.sample_id), llm)

    return rollout


# ---------------------------------------------------------------- images


def images_of(sample: Any) -> list[Any]:
    """Return the images of a data source's sample. Raises ConfigError if it has other media."""
    given = getattr(sample, INPUTS, None) or {}
    if others := [name for name, value in given.items() if value is not None and name != "images"]:
        raise ConfigError(
            f"sample {sample.index} has {', '.join(others)}, but april only supports text and images; let slime itself "
            "talk to the servers: --custom-generate-function-path slime.rollout.sglang_rollout.generate"
        )
    return list(given.get("images") or ())


def _with_images(given: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    images = given.get("images")
    return {**dict.fromkeys(given), **({"images": [change(image) for image in images]} if images else {})}


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def _opened(data: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(data)).convert("RGB")


class SampleImages:
    """Puts images, and the outputs of the trainer's ``processor`` for them, into samples."""

    def __init__(self, framework: Framework, processor: Any) -> None:
        self._options = framework.get("utils.processing_utils.build_processor_kwargs")
        self.processor = processor
        self._pictures = lru_cache(_CACHED_GROUPS)(attached_pictures)

    @classmethod
    def of(cls, framework: Framework, args: Any) -> SampleImages | None:
        """Make an instance, or return None if the data set has no images. ConfigError if the processor is missing."""
        if not getattr(args, "multimodal_keys", None):
            return None
        load = framework.get("utils.processing_utils.load_processor")
        processor = load(args.hf_checkpoint, trust_remote_code=True)
        if processor is None:
            raise ConfigError(
                f"--multimodal-keys declares images, but {framework.name} finds no processor for them at "
                f"--hf-checkpoint {args.hf_checkpoint}"
            )
        return cls(framework, processor)

    def put_back(self, sample: Any, attached: tuple[Placed, ...]) -> None:
        """Set a sample's images to ``attached``, in the form that the data source uses."""
        if attached:
            setattr(sample, INPUTS, {**(getattr(sample, INPUTS, None) or {}), "images": self._pictures(attached)})

    def finish(self, sample: Any, delivered: DeliveredSample, made: dict[tuple[Placed, ...], Any]) -> None:
        """Add the training inputs for a sample's images; ``made`` caches them for samples with the same images."""
        attached = delivered.attached
        if not attached:
            return
        self.put_back(sample, delivered.prompt.attached)
        if attached not in made:  # the processor gets the images only, since the sample already contains their tokens
            images = self._pictures(attached)
            text = str(self.processor.image_token) * len(images)
            inputs = self.processor(text=text, **self._options({"images": images}))
            made[attached] = {name: value for name, value in inputs.items() if name not in NOT_TRAINED} or None
        setattr(sample, TRAIN_INPUTS, made[attached])
