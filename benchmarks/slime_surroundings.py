"""slime, or its fork miles, unmodified and from a source tree, as far as a rollout goes, on a machine without a GPU.

Flags go through the trainer's own definitions of them. SGLang is not there: the trainer imports its names and calls
nothing of it on the way of a rollout, so empty modules stand in; Megatron is not even imported. What else surrounds a
rollout is real: data source and buffer, samples, checkpoints, HTTP client, hooks, loaders.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
from collections.abc import MutableSequence, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

ABSENT = ("sglang",)
WORDS = 4000


class _Nothing(type):
    """An empty class whose methods do nothing."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *values, **named: None


class _Empty(types.ModuleType):
    """Has every name that is asked for; each is an empty class."""

    __path__: MutableSequence[str] = []  # noqa: RUF012 - as modules have it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def pretend_what_is_absent() -> None:
    """Let modules be imported that need a GPU; those that are installed stay as they are."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


class Trainer:
    """slime or miles, imported by ``name`` from ``PYTHONPATH``."""

    def __init__(self, name: str) -> None:
        pretend_what_is_absent()
        self.name = name

    def get(self, path: str) -> Any:
        """What ``path`` below the package names."""
        module, _, name = f"{self.name}.{path}".rpartition(".")
        return getattr(importlib.import_module(module), name)

    def parser(self) -> argparse.ArgumentParser:
        """With the trainer's own flags; those of Megatron and SGLang are not in it."""
        parser = argparse.ArgumentParser(prog=self.name, allow_abbrev=False)
        with mock.patch.object(sys, "argv", [self.name]):  # some of its flags depend on others
            self.get(f"utils.arguments.get_{self.name}_extra_args_provider")()(parser)
        return parser

    def arguments(self, url: str, work: Path, flags: Sequence[str] = ()) -> argparse.Namespace:
        """The namespace of a run on the server at ``url``: small defaults, and ``flags`` above them.

        ``work``: directory with the files of :func:`write_inputs`.
        """
        defaults = (
            "--hf-checkpoint", str(work / "tokenizer"), "--prompt-data", str(work / "prompts.jsonl"),
            "--input-key", "prompt", "--label-key", "label", "--num-rollout", "1000",
            "--rollout-max-response-len", "600", "--rollout-temperature", "0.8", "--use-tis",
            "--custom-rm-path", f"{__name__}.reward",
        )  # fmt: skip
        args = self.parser().parse_args([*defaults, *flags])
        if args.over_sampling_batch_size is None:  # as the trainer's own validation does
            args.over_sampling_batch_size = args.rollout_batch_size
        host, _, port = url.removeprefix("http://").partition(":")
        others = {
            "sglang_router_ip": host, "sglang_router_port": int(port), "sglang_server_concurrency": 512,
            "sglang_dp_size": 1, "sglang_speculative_algorithm": None, "rollout_num_engines": 1, "save": None,
            "load": None, "load_debug_rollout_data": None, "eval_datasets": [], "ci_test": False,
            "use_distributed_post": False, "chat_template_path": None,
        }  # fmt: skip
        for name, value in others.items():
            setattr(args, name, value)
        self.get("utils.http_utils.init_http_client")(args)
        return args

    def data_source(self, args: argparse.Namespace) -> Any:
        """The trainer's own, with its buffer; ``drawn`` lists the groups that left the data set, in order."""
        source: Any = self.get("rollout.data_source.RolloutDataSourceWithBuffer")
        plain: Any = self.get("rollout.data_source.RolloutDataSource")

        class Counting(source):  # type: ignore[misc]
            drawn: list[int]

            def get_samples(self, num_samples: int) -> Any:
                first = self.sample_group_index
                groups = super().get_samples(num_samples)
                self.drawn.extend(range(first, self.sample_group_index))
                return groups

        Counting.__module__ = plain.__module__
        made = Counting(args)
        made.drawn = []
        return made


async def reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """By turns 0 and 1: groups differ within."""
    return float(sample.index % 2)


def write_inputs(work: Path, prompts: int = WORDS - 1) -> Path:
    """A tokenizer of words, and different prompts of two words each, below ``work``."""
    tokenizers = importlib.import_module("tokenizers")
    directory = work / "tokenizer"
    directory.mkdir(parents=True, exist_ok=True)
    words = {"[UNK]": 0, "[EOS]": 1, **{f"q{i}": 2 + i for i in range(WORDS)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))  # noqa: S106
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(directory / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "[EOS]", "unk_token": "[UNK]"}
    (directory / "tokenizer_config.json").write_text(json.dumps(said), "utf-8")
    lines = [json.dumps({"prompt": f"q{i} q{i + 1}", "label": str(i)}) for i in range(prompts)]
    (work / "prompts.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    return work

