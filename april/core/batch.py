"""Defines the batch that april delivers to the trainer: its rows, and ragged and padded arrays of their values.

A batch has ``rollout_batch_size`` finished groups or, with a group quorum below 1, as many samples as these groups
would have. The rows are ordered by group; ``group_ids[row]``, ``sample_indices[row]`` and ``samples[row].id`` identify
the sample of a row. In shapes, B is the number of rows, P the length of a prompt and T that of a response; in padded
arrays, P and T are the longest of the batch.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import DTypeLike, NDArray

from april.core.attachments import NO_EXTRAS, Extras, Placed, before, first_rows, whole_rows
from april.core.row_rewards import RowReward
from april.core.tape import Float32, Int32, Segment, SegmentKind, versions_of
from april.core.types import FinishReason, Group, Prompt, Sample, SampleId
from april.core.versions import PolicyVersion, VersionClock
from april.core.whole_numbers import whole_number
from april.corrections.advantages import Cohort, Method, first_others_of, group_advantages, process_advantages
from april.corrections.loss_weights import BatchShare

UInt8 = NDArray[np.uint8]
SplitBy = Literal["samples", "tokens"]

log = logging.getLogger("april")
_warned_of: set[str] = set()
"""Reasons for all-zero advantages for which a warning was already logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredSample:
    """One row of a batch: a finished response.

    If a rollout function used several conversations, each one with generated tokens is a row. These rows have the same
    ``id``, and the same reward and cohort unless the reward function returned one reward per row.
    """

    id: SampleId
    prompt: Prompt
    """prompt of the sample; in a later conversation, the tokens of its first ``llm.generate`` call"""
    tokens: Int32
    """int32 [T], EOS included"""
    logprobs: Float32
    """float32 [T], behaviour log-probabilities in nats; 0 for environment tokens"""
    loss_mask: UInt8
    """uint8 [T], 1 for tokens that the policy generated and that are not older than ``max_staleness``"""
    segments: tuple[Segment, ...]
    staleness: int
    """number of weight updates between the oldest generated token and its training; each batch that was delivered
    earlier and is not trained yet counts as one update"""
    reward: float
    cohort: tuple[tuple[int, float], ...]
    """(sample index, reward) of the first k samples of the group to finish, in that order. k is the group's quorum, by
    default all samples of the group. If the reward function returned one reward per row, the cohort has the rewards of
    this row only, and only of samples that have it"""
    finish: FinishReason
    attempts: int
    """number of requests to engines"""
    resumes: int
    """number of requests to engines that continued a partly generated response"""
    chain: int = 0
    """index of the row's conversation within its sample; 0 is the first"""
    attached: tuple[Placed, ...] = ()
    """attachments of the conversation, such as images: those of ``prompt`` and of later tool results"""
    extras: Extras = field(default=NO_EXTRAS, compare=False)
    """per-token arrays from engines by name, such as routed experts: [P + T - 1, ...], read-only. Row i was computed
    when the model read token i of prompt and response, to predict token i + 1. Rows beyond the last generated token
    repeat the last row before it"""
    turns: tuple[tuple[int, int], ...] = ()
    """(start, end) of each turn in the response; a turn is a call of ``llm.generate`` that generated tokens"""
    row_reward: RowReward | None = field(default=None, compare=False)
    """the reward with its parts, arrays and note; None if the reward function returned a number"""
    cohort_values: Extras = field(default=NO_EXTRAS, compare=False, repr=False)
    """parts and values per turn of the cohort's rewards, float32 [k, values] by name, padded with NaN;
    :meth:`Batch.advantages` computes the baselines of parts and turns from them"""
    output: Any = field(default=None, compare=False, repr=False)
    """return value of the sample's rollout function; None outside of the process that ran the function"""

    @property
    def versions(self) -> Int32:
        """int32 [T, 2], policy version of each token: (incarnation, ``n``), which count restarts and weight updates."""
        return versions_of(self.segments)

    @property
    def kept_mask(self) -> UInt8:
        """uint8 [T], 1 where a token was sampled with keys and values of older weights (``on_weight_update: keep``), so
        that recomputing its log-probability gives another value"""
        return np.repeat(np.array([s.over is not None for s in self.segments], np.uint8), self._counts)

    @property
    def constrained_mask(self) -> UInt8:
        """uint8 [T], 1 where a grammar decided which tokens could be sampled (``constraints: enforce``). The
        log-probabilities there are those of the tokens that the grammar allowed"""
        return np.repeat(np.array([s.constrained for s in self.segments], np.uint8), self._counts)

    @property
    def temperatures(self) -> Float32:
        """float32 [T], temperature at which each token was sampled; 1 for environment tokens"""
        found = [s.temperature if s.kind is SegmentKind.GENERATED else 1.0 for s in self.segments]
        return np.repeat(np.array(found, np.float32), self._counts)

    @property
    def _counts(self) -> list[int]:
        return [s.count for s in self.segments]

    @property
    def baseline_rewards(self) -> Float32:
        """float32 [k - 1], rewards for the sample's baseline: those of the first k - 1 other samples to finish.

        ``k`` is as in :attr:`cohort`. Every sample of the group gets the same number of rewards and never its own, so
        the baseline does not depend on the sample or on how long it took.
        """
        (others,) = first_others_of([self.id.index], [self.cohort])
        rewards: Float32 = others[~np.isnan(others)].astype(np.float32)
        return rewards


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The batch that a step delivers to the trainer; april keeps the samples until the trainer commits it."""

    id: int
    version: PolicyVersion
    """policy version at delivery"""
    samples: tuple[DeliveredSample, ...]
    """rows of the batch; the rows of one sample are adjacent"""
    group_sizes: tuple[int, ...]
    """number of rows in this batch per group; sums to len(samples)"""
    metrics: Mapping[str, float]
    logprob_kind: str = "temperature"
    """Distribution from which ``logprobs`` are computed:

    ``temperature``: log_softmax(logits / temperature).
    ``processed``: the distribution that was sampled from; equal to ``temperature`` if top_p is 1, min_tokens is 0 and
    the temperature is above 0.
    ``raw``: log_softmax(logits); allowed only at temperature 1, where it equals ``temperature``.
    ``unknown``: not known; allowed only at temperature 1.
    ``mixed``: differs between engines; the ``segments`` of a row name the engine of each token.
    Tokens with ``constrained_mask`` 1 are always ``processed``."""
    bottleneck: str = ""
    """Sentence for users that says what the step waited for, how long and why, and what to change; empty if the step
    took no time"""
    branches: Mapping[int, int] = field(default_factory=dict)
    """Version number ``n`` from which each restarted run went on, by the incarnation (restart count) before it"""
    _part: BatchShare | None = None
    """share of the whole batch that this batch is, set by :meth:`split`; None for a whole batch"""
    _no_rows: Extras = field(default=NO_EXTRAS, repr=False, compare=False)
    """extras with 0 rows, set by :meth:`split`, so that a share without samples knows their shapes and types"""
    _no_values: RowReward | None = field(default=None, repr=False, compare=False)
    """reward whose arrays have 0 rows, set by :meth:`split`, so that a share without samples knows their layout"""

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        return (
            f"<Batch {self.id}{f' share {self.share.rank} of {self.share.ranks}' if self._part else ''} "
            f"version={self.version} groups={len(self.group_sizes)} samples={len({s.id for s in self.samples})} "
            f"{'' if self.one_row_each else f'rows={len(self)} '}"
            f"tokens={sum(len(s.tokens) for s in self.samples)} off_policy_share={self.off_policy_share:.3f}"
            f"{f' ({self.bottleneck})' if self.bottleneck else ''}>"
        )

    @property
    def trained_at(self) -> PolicyVersion:
        """Expected version when the batch is trained: each untrained batch delivered before it adds one update."""
        return self.version._replace(n=self.version.n + int(self.metrics.get("batches_out", 0.0)))

    @cached_property
    def share(self) -> BatchShare:
        """Share of the whole batch that this batch is, and the totals by which a loss over all shares is divided.

        Pass it to :func:`april.loss_weights`. In a loss of your own, divide by its ``samples`` or ``loss_tokens``,
        which count the whole batch.
        """
        if self._part is not None:
            return self._part
        loss_tokens = sum(int(np.count_nonzero(s.loss_mask)) for s in self.samples)
        return BatchShare(0, 1, len({s.id for s in self.samples}), loss_tokens)

    def split(self, ranks: int, by: SplitBy = "samples") -> list[Batch]:
        """Split the batch into ``ranks`` shares; each sample is in one share, and the order of samples is kept.

        ``by="samples"`` gives contiguous rows; the numbers of samples differ by at most one. ``by="tokens"`` gives
        about equal numbers of prompt and response tokens, but different numbers of samples. With more ranks than
        samples, some shares are empty: their arrays have B = 0.

        Each share has the ``metrics`` and ``off_policy_share`` of the whole batch. Its :meth:`advantages` are those
        that the whole batch has for the same rows, as each sample carries the rewards of its group. The same batch is
        always split in the same way. A share may be split again: its :attr:`share` still counts the whole batch.

        Raises ValueError for ``ranks`` below 1 and for an unknown ``by``.
        """
        if (count := whole_number(ranks)) is None or count < 1:
            raise ValueError(f"split: ranks must be a whole number and at least 1, got {ranks!r}")
        if by not in get_args(SplitBy):
            raise ValueError(f'split: by must be "samples" or "tokens", got {by!r}')
        numbers = self.sample_numbers
        if by == "samples":
            of_samples = _contiguous(int(numbers[-1]) + 1 if len(numbers) else 0, count)
        else:
            lengths = np.bincount(numbers, [len(s.prompt.token_ids) + len(s.tokens) for s in self.samples])
            of_samples = _balanced([int(length) for length in lengths], count)
        ends = np.searchsorted(numbers, np.arange(len(self) + 1)).tolist()
        shares = [[row for n in share for row in range(ends[n], ends[n + 1])] for share in of_samples]
        groups = [number for number, size in enumerate(self.group_sizes) for _ in range(size)]
        no_rows = first_rows(self.samples[0].extras, 0) if self.samples else self._no_rows
        no_values = self._layout
        if no_values is not None:
            no_values = replace(
                no_values, per_turn=first_rows(no_values.per_turn, 0), note=None,
                per_token=first_rows(no_values.per_token, 0),
            )  # fmt: skip
        return [
            replace(
                self,
                samples=tuple(self.samples[row] for row in rows),
                group_sizes=tuple(len(list(run)) for _, run in itertools.groupby(groups[row] for row in rows)),
                _part=replace(self.share, rank=rank, ranks=count),
                _no_rows=no_rows,
                _no_values=no_values,
            )
            for rank, rows in enumerate(shares)
        ]

    @cached_property
    def rewards(self) -> Float32:
        """float32 [B], reward of each row: its sample's reward, or its own if there is one reward per row."""
        return np.array([s.reward for s in self.samples], np.float32)

    @cached_property
    def parts(self) -> dict[str, Float32]:
        """float32 [B] by name, named parts of each row's reward; empty if the reward function returned numbers."""
        names = () if self._layout is None else self._layout.parts
        return {name: np.array([_reward_of(s).parts[name] for s in self.samples], np.float32) for name in names}

    @property
    def _layout(self) -> RowReward | None:
        """Any reward of the batch, as all have the same names, shapes and types; None if rewards are plain numbers."""
        return self.samples[0].row_reward if self.samples else self._no_values

    @cached_property
    def group_ids(self) -> NDArray[np.int64]:
        """int64 [B], number of each row's group; groups are numbered in the order in which their prompts were drawn."""
        return np.array([s.id.group for s in self.samples], np.int64)

    @cached_property
    def sample_numbers(self) -> Int32:
        """int32 [B], number of each row's sample in this batch, from 0; the rows of one sample have the same number."""
        return sample_numbers(self.samples)

    @property
    def one_row_each(self) -> bool:
        """True if every sample has exactly one row."""
        return len({s.id for s in self.samples}) == len(self.samples)

    @cached_property
    def sample_indices(self) -> Int32:
        """int32 [B], index of each row's sample within its group."""
        return np.array([s.id.index for s in self.samples], np.int32)

    @property
    def off_policy_share(self) -> float:
        """Share of the generated response tokens that are older than the version at which they are trained."""
        return self.metrics["off_policy_share"]

    @cached_property
    def lengths(self) -> Int32:
        """int32 [B], number of response tokens of each row."""
        return np.array([len(s.tokens) for s in self.samples], np.int32)

    @cached_property
    def token_ages(self) -> Int32:
        """int32 [sum of T], number of weight updates between each token and its training; 0 for environment tokens.

        The rows are concatenated as in :meth:`ragged`. For a token from before a restart, the age is the number of
        updates between its version and the version from which the restarted run went on, plus the updates since.
        """
        clock = VersionClock(self.trained_at, dict(self.branches))
        ages, counts = [], []
        for sample in self.samples:
            for s in sample.segments:
                ages.append(clock.staleness(s.version) if s.kind is SegmentKind.GENERATED else 0)
                counts.append(s.count)
        return np.repeat(np.array(ages, np.int32), np.array(counts, np.int64))

    def advantages(
        self, method: Method = "grpo", *, of: str = "", epsilon: float = 1e-6, ddof: int = 0
    ) -> Float32:
        """Return advantages, float32 [B]: each response is compared with the first others of its group to finish.

        The rewards of these others are :attr:`DeliveredSample.baseline_rewards`. By default they are all others of the
        group, as in the textbook; with a group quorum below 1, they may be in other batches.
        ``method`` is ``grpo``, ``dr_grpo``, ``rloo``, ``dapo`` or ``gspo``; see :func:`april.group_advantages` for
        formulas, papers and errors.

        ``of`` names values to compare instead of the rewards. For a part of the rewards, the result is float32 [B]; the
        weighted sum of such results is GDPO's advantage before its normalisation over the batch. For values per turn,
        it is float32 [B, T]: see :func:`~april.corrections.advantages.process_advantages`.

        Raises ValueError if the rewards have no values named ``of``, or for values per turn without ``method="grpo"``.
        """
        own, cohorts = [s.reward for s in self.samples], [s.cohort for s in self.samples]
        if of:
            like = self._layout
            names = () if like is None else (*like.parts, *(n for n, rows in like.per_turn.items() if rows.ndim == 1))
            if of not in names:
                has = ", ".join(names) or "neither"
                raise ValueError(f"advantages: of must name a part or values per turn ({has} of them), got {of!r}")
            if of not in self.parts:
                return self._turn_advantages(of, method, epsilon, ddof)
            own = [_reward_of(s).parts[of] for s in self.samples]
            tables = [s.cohort_values[of][:, 0].tolist() if s.cohort else [] for s in self.samples]
            cohorts = [
                tuple((index, value) for (index, _), value in zip(cohort, values, strict=True))
                for cohort, values in zip(cohorts, tables, strict=True)
            ]
        others = first_others_of(self.sample_indices, cohorts)
        found = group_advantages(own, others, method, epsilon=epsilon, ddof=ddof)
        if len(found) and not found.any():
            self._warn_of_no_signal()
        return found

    def _turn_advantages(self, of: str, method: str, epsilon: float, ddof: int) -> Float32:
        if method != "grpo":
            raise ValueError(f'advantages: values per turn, such as {of}, need the method "grpo", got {method!r}')
        places = [tuple((index, float(m)) for m, (index, _) in enumerate(s.cohort)) for s in self.samples]
        advantages = np.zeros((len(self), int(self.lengths.max(initial=0))), np.float32)
        for row, s, others in zip(advantages, self.samples, first_others_of(self.sample_indices, places), strict=True):
            table = s.cohort_values.get(of, others)[others[~np.isnan(others)].astype(np.int64)]
            found = process_advantages(_reward_of(s).per_turn[of], table[~np.isnan(table)], epsilon=epsilon, ddof=ddof)
            for (start, end), advantage in zip(s.turns, found, strict=True):
                row[start:end] = advantage
        return advantages

    def _warn_of_no_signal(self) -> None:
        if not any(len(s.cohort) > 1 for s in self.samples):
            why = (
                "every response is alone in its group, so there is nothing to compare it with; raise "
                "n_samples_per_prompt"
            )
        elif not self.rewards.any():
            why = (
                "all rewards are 0; give reward= or group_reward=, or check whether your reward function ever returns "
                "another value"
            )
        else:
            why = "the rewards within each group are equal; filter=april.rewards_differ replaces such groups"
        if why not in _warned_of:
            _warned_of.add(why)
            log.warning("all advantages of batch %d are 0, so the model learns nothing from it: %s", self.id, why)

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of the extras: per-token arrays that engines returned."""
        return tuple(self.samples[0].extras if self.samples else self._no_rows)

    def ragged(self) -> dict[str, NDArray[Any]]:
        """Return flat arrays without padding; row i is ``response_ids[response_offsets[i]:response_offsets[i + 1]]``.

        ``prompt_ids`` int32 [sum of P], ``prompt_offsets`` int64 [B + 1]; ``response_ids`` int32, ``logprobs`` float32,
        ``loss_mask``, ``kept_mask`` and ``constrained_mask`` uint8, ``temperatures`` float32, ``version_n`` and
        ``version_incarnation`` int32, all [sum of T], ``response_offsets`` int64 [B + 1]; ``rewards`` float32,
        ``group_ids`` int64, ``sample_numbers`` and ``staleness`` int32, all [B].

        Extras are under their own names, [sum of P + T - 1, ...], with ``extras_offsets`` int64 [B + 1]. The values of
        rewards are under their own names, too: parts float32 [B], values per token [sum of T, ...], values per turn
        [sum of turns, ...] with ``turn_offsets`` int64 [B + 1] and with ``turn_numbers`` int32 [sum of T], the number
        of each token's turn in its row (-1 for environment tokens).
        """
        samples = self.samples
        prompts = [s.prompt.token_ids for s in samples]
        arrays = {"prompt_ids": _joined(prompts, np.int32), "prompt_offsets": _offsets(prompts)}
        layout = self._layout
        for name, (rows, dtype, _) in _response_columns(samples, 0, layout).items():
            arrays[name] = _joined(rows, dtype)
        if layout is not None:
            for name, empty in layout.per_token.items():
                arrays[name] = np.concatenate([_reward_of(s).per_token[name] for s in samples] or [empty])
            for name, empty in layout.per_turn.items():
                rows = [_reward_of(s).per_turn[name] for s in samples]
                arrays |= {name: np.concatenate(rows or [empty]), "turn_offsets": _offsets(rows)}
        arrays["response_offsets"] = _offsets([s.tokens for s in samples])
        for name in self.extras:
            rows = [s.extras[name] for s in samples]
            arrays |= {name: np.concatenate(rows or [self._no_rows[name]]), "extras_offsets": _offsets(rows)}
        return arrays | _per_row(samples) | self.parts

    def padded(self, pad_id: int = 0, *, left_pad_prompts: bool = False) -> dict[str, NDArray[Any]]:
        """Return padded arrays; responses are padded on the right, prompts too unless ``left_pad_prompts``.

        ``prompt_ids`` int32 and ``prompt_mask`` uint8 [B, P]; ``response_ids`` int32, ``response_mask`` uint8,
        ``loss_mask``, ``kept_mask`` and ``constrained_mask`` uint8, ``logprobs`` float32, ``temperatures`` float32 (1
        in the padding), ``version_n`` and ``version_incarnation`` int32 (-1 in the padding), all [B, T]; ``rewards``
        float32, ``group_ids`` int64, ``sample_numbers`` and ``staleness`` int32, all [B].

        ``input_ids`` int32 and ``attention_mask`` uint8 hold each prompt and its response without a gap. With
        ``left_pad_prompts`` they are [B, P + T] and every response begins in column P: the layout of trainers that
        slice the last T columns of the logits. Without it they are [B, longest sum], padded on the right only, and
        response i begins in column ``prompt_mask[i].sum()``. Extras are under their own names and have the same first
        two dimensions: each row is in the column of the token that was read to compute it, and other columns are 0.

        The values of rewards are under their own names, padded with 0: parts float32 [B]; values per token [B, T, ...]
        in the columns of ``response_ids``; values per turn [B, most turns, ...], with ``turn_numbers`` int32 [B, T],
        the number of each token's turn in its row (-1 for environment tokens and in the padding).

        Raises TypeError for a ``pad_id`` that is not an integer, or beyond int32.
        """
        if (padding := whole_number(pad_id)) is None or not -(2**31) <= padding < 2**31:
            raise TypeError(
                f"padded: pad_id must be a token id, got {pad_id!r}; where masks are used, any id will do, so leave "
                "pad_id out if the tokenizer has none"
            )
        samples = self.samples
        prompts = [s.prompt.token_ids for s in samples]
        responses = [s.tokens for s in samples]
        arrays = {
            "prompt_ids": pad(prompts, padding, np.int32, left=left_pad_prompts),
            "prompt_mask": pad(_ones(prompts), 0, np.uint8, left=left_pad_prompts),
            "response_mask": pad(_ones(responses), 0, np.uint8),
        }
        layout = self._layout
        for name, (rows, dtype, fill) in _response_columns(samples, padding, layout).items():
            arrays[name] = pad(rows, fill, dtype)
        if layout is not None:
            for name, empty in layout.per_token.items():
                arrays[name] = pad([_reward_of(s).per_token[name] for s in samples], 0, empty.dtype, empty.shape[1:])
            for name, empty in layout.per_turn.items():
                arrays[name] = pad([_reward_of(s).per_turn[name] for s in samples], 0, empty.dtype, empty.shape[1:])
        if left_pad_prompts:
            arrays["input_ids"] = np.concatenate((arrays["prompt_ids"], arrays["response_ids"]), axis=1)
            arrays["attention_mask"] = np.concatenate((arrays["prompt_mask"], arrays["response_mask"]), axis=1)
        else:
            whole = [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]
            arrays["input_ids"] = pad(whole, padding, np.int32)
            arrays["attention_mask"] = pad(_ones(whole), 0, np.uint8)
        for name in self.extras:
            rows = [s.extras[name] for s in samples]
            like = rows or [self._no_rows[name]]
            out = arrays[name] = np.zeros((*arrays["input_ids"].shape, *like[0].shape[1:]), np.result_type(*like))
            for i, row in enumerate(rows):
                start = int(arrays["attention_mask"][i].argmax())
                out[i, start : start + len(row)] = row
        return arrays | _per_row(samples) | self.parts


def with_all_rows(samples: Sequence[DeliveredSample]) -> list[DeliveredSample]:
    """Return the samples, with zeros as extras for samples that have no generated tokens and so no extras."""
    first = next((s.extras for s in samples if s.extras), NO_EXTRAS)

    def whole(s: DeliveredSample) -> DeliveredSample:
        count = len(s.prompt.token_ids) + len(s.tokens) - 1
        none = {name: np.zeros((count, *rows.shape[1:]), rows.dtype) for name, rows in first.items()}
        return replace(s, extras=whole_rows(none, count))

    return [s if s.extras or not first else whole(s) for s in samples]


def deliver_sample(
    sample: Sample, staleness_of: Callable[[PolicyVersion], int], max_staleness: int | None
) -> list[DeliveredSample]:
    """Return the batch rows of a finished sample. Tokens older than ``max_staleness`` get loss mask 0 (None: no limit).

    The arrays are copies, so that the trainer may write into them without changing the sample in saved states.
    """
    assert sample.finish is not None
    prompt = sample.group.prompt
    rows, rewards = [], sample.row_rewards
    for number, chain in enumerate(sample.row_chains):
        tape, attached = chain.tape, chain.attached
        own = None if not rewards else rewards[0] if rewards[0].row is None else rewards[number]
        cohort, values = _cohort_of(sample.group, own)
        mask = tape.loss_mask()
        staleness = 0
        for segment in tape.segments:
            if segment.kind is SegmentKind.GENERATED:
                age = staleness_of(segment.version)
                staleness = max(staleness, age)
                if max_staleness is not None and age > max_staleness:
                    mask[segment.start : segment.start + segment.count] = 0
        rows.append(
            DeliveredSample(
                id=sample.id,
                prompt=Prompt(
                    chain.prompt.copy(), prompt.data, prompt.epoch, prompt.position,
                    before(attached, len(chain.prompt)) if attached else (),
                ),
                tokens=tape.tokens.copy(),
                logprobs=tape.logprobs.copy(),
                loss_mask=mask,
                segments=tuple(tape.segments),
                staleness=staleness,
                reward=sample.reward if own is None else own.reward,
                cohort=cohort,
                finish=sample.finish,
                attempts=sample.attempts,
                resumes=sample.resumes,
                chain=chain.number,
                attached=attached,
                extras=whole_rows(chain.extras, len(chain.prompt) + len(tape) - 1) if chain.extras else NO_EXTRAS,
                turns=chain.turns,
                row_reward=own,
                cohort_values=values,
            )
        )
    return rows


def _cohort_of(group: Group, own: RowReward | None) -> tuple[Cohort, Extras]:
    """Return the cohort with which a row is compared, and the cohort's values by name, float32 [k, values].

    A reward that belongs to one row is compared with the rewards of the same row of the samples that have this row.
    """
    values = group.cohort_values
    if not values or own is None:
        return group.cohort, NO_EXTRAS
    if own.row is None:
        return group.cohort, {name: table[:, 0] for name, table in values.items()}
    rewards = values[""][:, own.row : own.row + 1, 0]  # empty if no sample of the cohort has so many rows
    there = np.flatnonzero(np.isfinite(rewards))
    cohort = tuple((group.cohort[m][0], float(rewards[m, 0])) for m in there)
    return cohort, {name: table[there][:, own.row] for name, table in values.items() if name and len(there)}


def _reward_of(row: DeliveredSample) -> RowReward:
    """Return the reward of a row, in a batch whose rewards are not plain numbers."""
    assert row.row_reward is not None
    return row.row_reward


class SampleFigures(NamedTuple):
    """Figures of one sample's rows, from which the metrics of a batch are computed."""

    tokens: int
    staleness: int
    """staleness of the row with the oldest token"""
    reward: float
    """mean over the rows"""
    resumes: int
    generated: int
    stale: int
    """generated tokens with a staleness above 0"""
    kept: int
    """generated tokens that were sampled with keys and values of older weights"""
    trained: int
    """generated tokens with loss mask 1"""


def figures_of(rows: Sequence[DeliveredSample], staleness_of: Callable[[PolicyVersion], int]) -> SampleFigures:
    """Return the figures of the rows of one sample."""
    generated = stale = kept = trained = tokens = staleness = 0
    reward = 0.0
    for row in rows:
        tokens += len(row.tokens)
        staleness = max(staleness, row.staleness)
        reward += row.reward
        trained += int(np.count_nonzero(row.loss_mask))
        for segment in row.segments:
            if segment.kind is SegmentKind.GENERATED:
                generated += segment.count
                stale += segment.count if staleness_of(segment.version) else 0
                kept += segment.count if segment.over is not None else 0
    return SampleFigures(tokens, staleness, reward / len(rows), rows[0].resumes, generated, stale, kept, trained)


def batch_metrics(
    groups: int, samples: Sequence[DeliveredSample], figures: Sequence[SampleFigures]
) -> dict[str, float]:
    """Return the metrics of a batch that depend only on its rows (``samples``) and the figures of each sample.

    ``trained_tokens`` counts all generated tokens, including the ``masked_tokens``, whose loss mask is 0.
    """
    table = np.fromiter(itertools.chain.from_iterable(figures), np.float64).reshape(-1, len(SampleFigures._fields))
    lengths, ages, rewards, resumes, *counts = table.T
    generated, stale, kept, trained = (float(column.sum()) for column in counts)
    like = samples[0].row_reward if samples else None
    numbers = sample_numbers(samples if like is not None else ())

    def mean(name: str) -> float:
        """Return the mean of a part of the rewards, first over the rows of each sample and then over samples."""
        sums = np.bincount(numbers, [_reward_of(s).parts[name] for s in samples])
        return float((sums / np.bincount(numbers)).mean())

    return {
        "groups": float(groups),
        "samples": float(len(table)),
        "trained_tokens": generated,
        "masked_tokens": generated - trained,
        "off_policy_share": stale / generated if generated else 0.0,
        "kept_share": kept / generated if generated else 0.0,
        "staleness_mean": float(ages.mean()) if len(table) else 0.0,
        "staleness_max": float(ages.max()) if len(table) else 0.0,
        "resumed_samples": float(np.count_nonzero(resumes)),
        "response_len_mean": float(lengths.mean()) if len(table) else 0.0,
        "response_len_median": _median(lengths),
        "response_len_max": float(lengths.max()) if len(table) else 0.0,
        "reward_mean": float(rewards.mean()) if len(table) else 0.0,
        **{f"reward_mean/{name}": mean(name) for name in (like.parts if like is not None else ())},
    }


def _median(values: NDArray[Any]) -> float:
    """Return the median, 0 without values; ``np.median`` would import numpy's masked arrays, which takes 0.1 s."""
    ordered = np.sort(values)
    return float(ordered[[(len(ordered) - 1) // 2, len(ordered) // 2]].mean()) if len(ordered) else 0.0


def sample_numbers(rows: Sequence[DeliveredSample]) -> Int32:
    """Number the samples from 0 and return each row's number, int32 [R]; rows of one sample must be adjacent."""
    numbers = [int(i > 0 and row.id != rows[i - 1].id) for i, row in enumerate(rows)]
    return np.cumsum(numbers, dtype=np.int32)


def rows_by_sample(rows: Sequence[DeliveredSample]) -> list[list[DeliveredSample]]:
    """Return one list of rows per sample, in order; the rows of one sample must be adjacent."""
    return [list(several) for _, several in itertools.groupby(rows, key=lambda row: row.id)]


Array = NDArray[Any]
Columns = dict[str, tuple[list[Array], type[np.generic], int]]
"""Per-token values by name: (rows, number type, padding value)."""


def pad(
    rows: Sequence[Array], fill: float, dtype: DTypeLike, shape: tuple[int, ...] = (), *, left: bool = False
) -> Array:
    """Return rows of different lengths as one array [len(rows), longest, *shape], padded on the right (or left)."""
    longest = max((len(r) for r in rows), default=0)
    out = np.full((len(rows), longest, *shape), fill, dtype)
    for i, row in enumerate(rows):
        start = longest - len(row) if left else 0
        out[i, start : start + len(row)] = row
    return out


def _turn_numbers(row: DeliveredSample) -> Int32:
    numbers = np.full(len(row.tokens), -1, np.int32)
    for number, (start, end) in enumerate(row.turns):
        numbers[start:end] = number
    return numbers


def _response_columns(samples: Sequence[DeliveredSample], pad_id: int, like: RowReward | None) -> Columns:
    turns: Columns = {"turn_numbers": ([_turn_numbers(s) for s in samples], np.int32, -1)}
    versions = [s.versions for s in samples]
    return {
        "response_ids": ([s.tokens for s in samples], np.int32, pad_id),
        "loss_mask": ([s.loss_mask for s in samples], np.uint8, 0),
        "kept_mask": ([s.kept_mask for s in samples], np.uint8, 0),
        "constrained_mask": ([s.constrained_mask for s in samples], np.uint8, 0),
        "temperatures": ([s.temperatures for s in samples], np.float32, 1),
        "logprobs": ([s.logprobs for s in samples], np.float32, 0),
        "version_n": ([v[:, 1] for v in versions], np.int32, -1),
        "version_incarnation": ([v[:, 0] for v in versions], np.int32, -1),
        **(turns if like is not None and like.per_turn else {}),
    }


def _per_row(samples: Sequence[DeliveredSample]) -> dict[str, Array]:
    return {
        "sample_numbers": sample_numbers(samples),
        "rewards": np.array([s.reward for s in samples], np.float32),
        "group_ids": np.array([s.id.group for s in samples], np.int64),
        "staleness": np.array([s.staleness for s in samples], np.int32),
    }


def _ones(rows: Sequence[Array]) -> list[Array]:
    return [np.ones(len(row), np.uint8) for row in rows]


def _joined(rows: Sequence[Array], dtype: type[np.generic]) -> Array:
    return np.concatenate(rows, dtype=dtype) if rows else np.empty(0, dtype)


def _offsets(rows: Sequence[Array]) -> Array:
    """Return the start of each row in the joined array, followed by the end of the last row, as int64 [B + 1]."""
    return np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)


def _contiguous(rows: int, ranks: int) -> Sequence[Sequence[int]]:
    """Split the numbers 0 to ``rows`` - 1 into ranges; the first ``rows % ranks`` ranges have one row more."""
    starts = [rank * (rows // ranks) + min(rank, rows % ranks) for rank in range(ranks + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def _balanced(tokens: Sequence[int], ranks: int) -> Sequence[Sequence[int]]:
    """Split rows so that the shares have about equal numbers of tokens; each share lists its rows in order.

    Rows are assigned from the longest to the shortest. Each row goes to the share that has the fewest tokens so far (on
    a tie, the fewest rows).
    """
    heap = [(0, 0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for row in sorted(range(len(tokens)), key=lambda row: (-tokens[row], row)):
        held, count, rank = heap[0]
        shares[rank].append(row)
        heapq.heapreplace(heap, (held + tokens[row], count + 1, rank))
    return [sorted(rows) for rows in shares]
