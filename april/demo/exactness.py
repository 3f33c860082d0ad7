"""Is every delivered token's log-probability that of the version it is stamped with?

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

from april.core.batch import DeliveredSample
from april.core.tape import SegmentKind
from april.demo.grpo import response_logprobs

StateDict = Mapping[str, torch.Tensor]


def snapshot(model: PreTrainedModel) -> StateDict:
    """A copy of the weights as they are now."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def logprob_error(
    model: PreTrainedModel, samples: Sequence[DeliveredSample], weights: Mapping[int, StateDict]
) -> tuple[float, int]:
    """(largest absolute difference in nats, tokens compared) over all generated tokens of ``samples``.

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
