"""Is every delivered token as the engine handed it over, with the log-probability of its version?

A witness keeps the tokens of each attempt where they leave the engine; the scheduler never touches its copy.

The weights of every version are kept; each delivered token is recomputed by a full forward pass of the model
under the weights of its stamp. A wrong stamp, a stale KV cache or a lost token shows as a difference.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from april.core.batch import Batch, DeliveredSample
from april.core.tape import SegmentKind
from april.demo.grpo import response_logprobs
from april.engines.protocol import Chunk, Engine, Request
from april.testing.recording_engine import RecordingEngine

StateDict = Mapping[str, torch.Tensor]


def snapshot(model: PreTrainedModel) -> StateDict:
    """Return a copy of the present weights."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def logprob_error(
    model: PreTrainedModel, samples: Sequence[DeliveredSample], weights: Mapping[int, StateDict]
) -> tuple[float, int]:
    """Return (largest absolute difference in nats, tokens compared) over all generated tokens of ``samples``.

    ``weights[n]`` are the weights of version n; ``model`` gives the architecture and is not changed.
    """
    by_version: dict[int, list[DeliveredSample]] = defaultdict(list)
    for sample in samples:
        for n in {s.version.n for s in sample.segments if s.kind is SegmentKind.GENERATED}:
            by_version[n].append(sample)
    checker = copy.deepcopy(model)
    largest, compared = 0.0, 0
    for n, rows in sorted(by_version.items()):
        checker.load_state_dict(weights[n])
        recomputed = response_logprobs(checker, [s.prompt.token_ids for s in rows], [s.tokens for s in rows])
        for sample, fresh in zip(rows, recomputed, strict=True):
            stamped = (sample.versions[:, 1] == n) & (sample.loss_mask == 1)
            if stamped.any():
                # NaN must not pass: np.max propagates it
                largest = float(np.max([largest, np.abs(sample.logprobs[stamped] - fresh[stamped]).max()]))
                compared += int(stamped.sum())
    return largest, compared


class Witness(RecordingEngine):
    """An engine that keeps a copy of what passes through it; recording can be switched off for evaluations."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.recording = True
        self.recorded_tokens = 0
        """Number of tokens handed over while recording."""

    def alter(self, request: Request, chunk: Chunk) -> Chunk:
        """Count the tokens."""
        self.recorded_tokens += len(chunk.tokens) if self.recording else 0
        return chunk

    def disagreements(self, batch: Batch) -> int:
        """Return the number of delivered tokens whose attempt handed over another token, log-probability or version."""
        wrong = 0
        for sample in batch.samples:
            used: dict[str, int] = {}
            for segment in sample.segments:
                if segment.kind is not SegmentKind.GENERATED:
                    continue
                rows = self.handed_over[segment.attempt_id]
                tokens = np.concatenate([r.tokens for r in rows])
                logprobs = np.concatenate([r.logprobs for r in rows])
                versions = np.concatenate([np.full(len(r.tokens), r.version.n) for r in rows])
                start = used.get(segment.attempt_id, 0)
                used[segment.attempt_id] = stop = start + segment.count
                here = slice(segment.start, segment.start + segment.count)
                equal = (
                    (sample.tokens[here] == tokens[start:stop])
                    & (sample.logprobs[here] == logprobs[start:stop])
                    & (sample.versions[here, 1] == versions[start:stop])
                )
                wrong += int(segment.count - equal.sum())
        return wrong
