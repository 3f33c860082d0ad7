"""Stands in for slime and miles: what a rollout function meets there, by the same names, without torch or ray.

Written from their contract: the data source and its buffer, the sample, the loaders and the hooks. The real ones are
heavy to install; what was run on them is in docs/slime.md.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from real_schedulers import LENGTHS, VOCAB
from tiny_vision import picture, tiny_processor

from april.adapters.slime import make_generate_rollout
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.engine import SimulatedEngine, by_sample_key

from . import modules


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """The fields that a rollout function may meet."""

    group_index: int | None = None
    index: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None
    train_metadata: dict[str, Any] | None = None
    rollout_routed_experts: Any = None
    rollout_id: int | None = None

    Status = Status

    def get_reward_value(self, args: Namespace) -> float:
        return float(self.reward[args.reward_key] if args.reward_key else self.reward)

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "status": self.status.value}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Sample:
        data = {**data, "status": Status(data["status"])}
        known = {f.name for f in fields(Sample)}
        sample = Sample(**{k: v for k, v in data.items() if k in known})
        for name in set(data) - known:
            setattr(sample, name, data[name])
        return sample


def images_of(offset: int) -> list[Any]:
    """A prompt has none, one or two images, of sizes and colours of its own."""
    sizes = [(56 + 28 * (offset % 3), 84), (28, 56 + 28 * (offset % 2))][: offset % 3]
    return [picture(*size, color=(offset % 256, 7 * offset % 256, i)) for i, size in enumerate(sizes)]


def show(sample: Sample, offset: int) -> None:
    """Images as slime's data set gives them, beside a text that the chat template has written."""
    images = images_of(offset)
    sample.prompt = "".join(f"<|vision_start|>{MARK}<|vision_end|>" for _ in images) + f"cats {offset}"
    sample.multimodal_inputs = {"images": images or None, "videos": None}


MARK = "<|image_pad|>"


def build_processor_kwargs(multimodal_inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """As slime's: lists of ids, and tensors of the rest."""
    text = {"return_tensors": None, "return_mm_token_type_ids": False}
    return {**(multimodal_inputs or {}), "text_kwargs": text, "images_kwargs": {"return_tensors": "pt"}}


def load_processor(name_or_path: str, **kwargs: Any) -> Any:
    return None if name_or_path == "text" else tiny_processor()


class DataSource:
    """Prompts in order, epoch after epoch; ``drawn`` lists the groups that were given."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.offset = self.groups = self.samples = 0
        self.drawn: list[int] = []

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        out = []
        for _ in range(num_samples):
            group = []
            for _ in range(self.args.n_samples_per_prompt):
                group.append(Sample(self.groups, self.samples, prompt=f"p{self.offset}", label=str(self.offset)))
                if self.args.multimodal_keys:
                    show(group[-1], self.offset)
                self.samples += 1
            self.drawn.append(self.groups)
            self.groups += 1
            self.offset = (self.offset + 1) % self.args.prompts
            out.append(group)
        return out

    def add_samples(self, samples: list[list[Sample]]) -> None:
        raise AssertionError("april keeps unfinished groups itself")

    def _path(self, directory: str, rollout_id: int) -> Path:
        return Path(directory) / "rollout" / f"global_dataset_state_dict_{rollout_id}.json"

    def save(self, rollout_id: int) -> None:
        path = self._path(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([self.offset, self.groups, self.samples]))

    def load(self, rollout_id: int | None = None) -> None:
        if self.args.load is not None and rollout_id is not None:
            self.offset, self.groups, self.samples = json.loads(self._path(self.args.load, rollout_id).read_text())

    def __len__(self) -> int:
        return int(self.args.prompts)


@dataclass
class RolloutFnTrainOutput:
    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class DynamicFilterOutput:
    """What a filter may return instead of a bool."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(fn: Any, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """The filter's verdict, a bool or more."""
    output = fn(*args, **kwargs)
    return output if isinstance(output, DynamicFilterOutput) else DynamicFilterOutput(keep=output)


class Tokenizer:
    """A token per prompt, and text that says which tokens there are."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [1 + int(text[1:]) % 900, 7]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(str(i) for i in ids if i or not skip_special_tokens)


def load_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    return tiny_processor().tokenizer if name_or_path == "seeing" else Tokenizer()


def load_function(path: str) -> Any:
    """What a dotted path of the command line names."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


async def async_rm(args: Namespace, sample: Sample, **kwargs: Any) -> Any:
    return await load_function(args.custom_rm_path)(args, sample, **kwargs)


async def batched_async_rm(args: Namespace, samples: list[Sample], **kwargs: Any) -> Any:
    return await load_function(args.custom_rm_path)(args, samples, **kwargs)


async def apply_rollout_sample_hooks(args: Namespace, value: Sample, **kwargs: Any) -> Sample:
    for path in args.rollout_sample_hook_path:
        result = load_function(path)(args, value)
        value = value if result is None else result
    return value


def evaluated(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """The framework's own rollout function, of which only the evaluation is used."""
    assert evaluation
    return ("evaluated", rollout_id)


class _Loop:
    """The framework's background loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=f"{id(self)} loop", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Calls that were given up a moment ago end first."""

        async def end() -> None:
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@contextmanager
def installed(name: str = "slime") -> Iterator[None]:
    """The framework can be imported by ``name``."""
    loop = _Loop()
    contents: dict[str, dict[str, Any]] = {
        "utils.misc": {"load_function": load_function},
        "utils.types": {"Sample": Sample},
        "utils.async_utils": {"get_async_loop": lambda: loop},
        "utils.processing_utils": {
            "load_tokenizer": load_tokenizer, "load_processor": load_processor,
            "build_processor_kwargs": build_processor_kwargs,
        },
        "rollout.base_types": {"RolloutFnTrainOutput": RolloutFnTrainOutput},
        "rollout.filter_hub.base_types": {"call_dynamic_filter": call_dynamic_filter},
        "rollout.rm_hub": {"async_rm": async_rm, "batched_async_rm": batched_async_rm},
        "rollout.sample_hooks": {"apply_rollout_sample_hooks": apply_rollout_sample_hooks},
        "rollout.sglang_rollout": {"generate_rollout": evaluated},
    }
    made = modules({f"{name}.{path}": names for path, names in contents.items()})
    assert not any(n.partition(".")[0] == name for n in sys.modules)
    sys.modules.update(made)
    try:
        yield
    finally:
        for path in made:
            sys.modules.pop(path, None)
        loop.close()


def namespace(**changes: Any) -> Namespace:
    """slime's flags, with the values of a small run: N = 3, N' = 5, n = 2."""
    values: dict[str, Any] = {
        "hf_checkpoint": "tok", "save": None, "load": None, "prompts": 500, "rollout_global_dataset": True,
        "rollout_batch_size": 3, "over_sampling_batch_size": 5, "n_samples_per_prompt": 2, "partial_rollout": True,
        "rollout_max_response_len": 100, "rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1,
        "rollout_stop": None, "rollout_stop_token_ids": None, "rollout_skip_special_tokens": False, "rollout_seed": 42,
        "mask_offpolicy_in_partial_rollout": False, "custom_generate_function_path": None, "custom_rm_path":
        "adapters.slime_stand_in.length_reward", "reward_key": None, "group_rm": False, "use_tis": True,
        "rollout_sample_hook_path": [], "dynamic_sampling_filter_path": None, "rollout_sample_filter_path": None,
        "rollout_all_samples_process_path": None, "buffer_filter_path": None, "use_rollout_routing_replay": False,
        "custom_reward_post_process_path": None, "custom_convert_samples_to_train_data_path": None,
        "advantage_estimator": "grpo", "rewards_normalization": True, "grpo_std_normalization": True,
        "log_passrate": False, "multimodal_keys": None,
    }  # fmt: skip
    others = {"april", "sglang_router_ip", "sglang_router_port", "colocate", "offload_rollout"}
    others |= {"use_dynamic_batch_size", "num_layers", "moe_router_topk"}
    assert not set(changes) - set(values) - others
    return Namespace(**(values | changes))


def data_of_the_actor(args: Namespace, samples: list[Sample]) -> dict[str, list[Any]]:
    """What slime's manager makes of delivered samples and its actor replays: the first sample decides on the rows, each
    has [layers, experts per token] for every token but its last, and is padded by a row for that one.
    """
    data: dict[str, list[Any]] = {"tokens": [sample.tokens for sample in samples]}
    if samples[0].rollout_routed_experts is not None:
        rows = [np.asarray(sample.rollout_routed_experts) for sample in samples]
        for one, ids in zip(rows, data["tokens"], strict=True):
            assert one.dtype == np.int32
            assert one.shape == (len(ids) - 1, args.num_layers, args.moe_router_topk)
        data["rollout_routed_experts"] = [np.concatenate([one, np.zeros_like(one[:1])]) for one in rows]
    if args.use_rollout_routing_replay:
        assert "rollout_routed_experts" in data, "rollout_routed_experts is required in rollout_data"
    return data


async def length_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """The number of response tokens."""
    return float(sample.response_length)


def simulated(name: str, **options: Any) -> SimulatedEngine:
    """0.5 ms a token, so that rollouts end in the middle of responses."""
    lengths = by_sample_key(LENGTHS)
    return SimulatedEngine(name, DecodeCost(5e-4, 0.0, 0.0), lengths, max_running=64, vocab_size=VOCAB, **options)


class Run:
    """A process of slime, with april's function on two simulated engines; a context manager.

    Args:
        directory: of its checkpoints.
        start: goes on with this rollout, from the checkpoint before it if there is one.
        engines_of: makes other engines.
    """

    def __init__(
        self, directory: Path | None = None, start: int = 0, *, engines_of: Callable[[], list[Any]] | None = None,
        **flags: Any,
    ) -> None:  # fmt: skip
        where = None if directory is None else str(directory)
        self.args = namespace(save=where, load=where, **flags)
        self.data = DataSource(self.args)
        if start:
            self.data.load(start - 1)
        extras = ("routed_experts",) if self.args.use_rollout_routing_replay else ()
        own = [simulated("e0", extras=extras), simulated("e1", stream_interval_s=1e-3, extras=extras)]
        self.engines: list[Any] = list(own) if engines_of is None else engines_of()
        self.function = make_generate_rollout(self.engines, check=True)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        """As a crash: what was not saved is gone."""
        self.function.close()

    def __call__(self, rollout_id: int) -> list[list[Sample]]:
        self.output = self.function(self.args, rollout_id, self.data)
        groups: list[list[Sample]] = self.output.samples
        return groups

    def samples(self, rollout_id: int) -> list[Sample]:
        return [sample for group in self(rollout_id) for sample in group]

    @property
    def session(self) -> Any:
        return self.function.sessions[id(self.data)]

    @property
    def scheduler(self) -> Any:
        return self.session.scheduler

    @property
    def hooks(self) -> Any:
        return self.session._hooks
