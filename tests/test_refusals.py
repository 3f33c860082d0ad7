"""What april refuses, and in which words: one table each for settings, flags, arguments and calls.

Where it can be known, it is refused before any work starts. ``test_driver_functions.py`` has the calls of rollout
functions, ``test_driver_mistakes.py`` what functions raise and return, ``test_driver.py`` what engines answer.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from real_schedulers import assert_nothing_is_left, check, config, engine, scheduler
from virtual_rollouts import VOCAB

import april
from april.config.flags import settings_of
from april.config.mistakes import NAMES_ELSEWHERE
from april.driver.rewards import Response
from april.engines.protocol import Capabilities
from april.engines.simulated.engine import SimulatedEngine
from april.errors import AprilError, CheckpointError, ConfigError

BASE: dict[str, Any] = {"rollout_batch_size": 32, "max_response_len": 1000}
URL = "http://127.0.0.1:8000"

# ---------------------------------------------------------------- settings

SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"rollout_batchsize": 2}, "rollout_batchsize: unknown setting; do you mean rollout_batch_size?"),
    ({"colour": 2}, "colour: unknown setting; see april.Config for the names"),
    ({"temperature": 0.7}, "temperature: unknown setting; do you mean sampling.temperature?"),
    ({"sampling": {"temprature": 1}}, "sampling.temprature: unknown setting; do you mean sampling.temperature?"),
    ({"engine": {"kind": "transformers", "slot": 1}}, "engine.slot: unknown setting; do you mean engine.slots?"),
    ({"max_tokens": 9}, "max_tokens: unknown setting; do you mean max_response_len?"),
    ({"stop_strings": ["a"]}, "stop_strings: unknown setting; do you mean sampling.stop?"),
    ({"num_generations": 4}, "num_generations: unknown setting; do you mean n_samples_per_prompt?"),
    ({"gconfig": {"n_samples": 4}}, "gconfig: unknown setting; do you mean n_samples_per_prompt?"),
    ({"rollout": {"n": 4}}, "rollout: unknown setting; do you mean n_samples_per_prompt?"),
    ({"generation_batch_size": 64},
     "generation_batch_size: unknown setting; do you mean rollout_batch_size, which counts prompts, not responses?"),
    ({"n_samples_per_eval_prompt": 2},
     "n_samples_per_eval_prompt: unknown setting; do you mean evaluate(n_samples=...) of the scheduler?"),
    ({"n": 4}, "n: april sends each sample of a group as a request of its own; set n_samples_per_prompt"),
    ({"sampling": 0.7}, "sampling: expected a mapping of settings, got 0.7"),
    ({"epochs": 2, "on_data_end": "wrap"}, (
        "epochs=2 limits the passes over the prompts, and on_data_end=wrap repeats them without end; leave out one of "
        "the two"
    )),
    ({"rollout_batch_size": 2, "over_sampling_batch_size": 9, "max_age": 3},
     "over_sampling_batch_size=9 is too large: with max_age=3 april can deliver 8 groups in time; raise max_age or set "
     "on_stale"),
    ({"sampling": {"top_k": 5}},
     "sampling.top_k: changes the distribution, so a trainer's recomputed log-probabilities could not match"),
    ({"sampling": {"stop": ["a", ""]}},
     "sampling.stop: an empty stop string would end every response at once; leave it out"),
    ({"sampling": {"stop": "\ufffd"}},
     "sampling.stop: the stop string '�' contains U+FFFD, which also stands for incomplete characters"),
    ({"sampling": {"stop": [3]}}, "sampling.stop.0: input should be a valid string, got 3"),
    ({"rollout_batch_size": ...}, "rollout_batch_size: is required"),
    ({"rollout_batch_size": "many"},
     "rollout_batch_size: input should be a valid integer, unable to parse string as an integer, got 'many'"),
    ({"rollout_batch_size": True}, "rollout_batch_size: must be a number, got True"),
    ({"sampling": {"stop_token_ids": 5}}, "sampling.stop_token_ids: input should be a valid tuple, got 5"),
    ({"sampling": {"stop_token_ids": [1, "x"]}},
     "sampling.stop_token_ids.1: input should be a valid integer, got 'x'; write the id of the token: "
     "tokenizer.convert_tokens_to_ids('x'); for text that ends a response, set stop"),
    ({"engine": "vllm"}, "engine: expected a mapping of settings, got 'vllm'; write engine: {kind: vllm}"),
    ({"abort_resend_s": float("inf")}, "abort_resend_s: input should be a finite number, got inf"),
    ({"on_stale": "panic"}, "on_stale: input should be 'finish', 'restart', 'mask' or 'drop', got 'panic'"),
    ({"sampling": {"temperature": float("nan")}}, "sampling.temperature: input should be a finite number, got nan"),
    ({"engine": {"kind": "simulated", "sigma_within": 11}},
     "engine.sigma_within: input should be less than or equal to 10, got 11"),
    ({"engine": {"kind": "llamacpp"}},
     "engine.kind: april has no engine 'llamacpp'; it has 'transformers', 'simulated', 'vllm', 'sglang', 'openai', "
     "'april'"),
    ({"engine": {"slots": 3}}, "engine.kind: is required"),
    ({"over_sampling_batch_size": 48, "partial_rollout": False, "max_staleness": 2},
     "max_staleness=2 lets tokens become older than their weights, but partial_rollout=false with "
     "over_sampling_batch_size=48 trains every batch with the weights that generated it; leave out max_staleness, or "
     "set partial_rollout: true"),
    ({"over_sampling_batch_size": 48, "partial_rollout": False, "on_stale": "drop"},
     "on_stale=drop has no effect with partial_rollout=false and over_sampling_batch_size=48, where nothing gets old; "
     "leave it out"),
    ({"over_sampling_batch_size": 48, "partial_rollout": False, "group_quorum": 0.75},
     "group_quorum=0.75 delivers the rest of a group in a later batch, but partial_rollout=false with "
     "over_sampling_batch_size=48 keeps no responses for one; leave out group_quorum, or set partial_rollout: true"),
    ({"over_sampling_batch_size": 48, "partial_rollout": False, "generation": "continuous"},
     "generation=continuous leaves unfinished responses at each weight update, and partial_rollout=false would throw "
     "them away; set partial_rollout: true"),
    ({"over_sampling_batch_size": 100, "max_staleness": 2},
     "over_sampling_batch_size=100 is too large: with max_staleness=2 april can deliver 96 groups in time; raise "
     "max_staleness or set on_stale"),
    ({"refill": "sample", "partial_rollout": False},
     "refill=sample leaves unfinished responses at the end of a step, and partial_rollout=false would throw them "
     "away; set partial_rollout: true or refill: none"),
    ({"sampling": {"min_tokens": 1000}, "allow_mismatch": True},
     "sampling.min_tokens=1000 must be below max_response_len=1000"),
    ({"sampling": {"min_tokens": 30}, "max_sample_tokens": 30, "allow_mismatch": True},
     "sampling.min_tokens=30 must be below max_sample_tokens=30"),
    ({"abort_resend_s": 31}, "abort_resend_s=31 is longer than abort_deadline_s=30"),
    ({"sampling": {"top_p": 0.9}},
     "sampling.top_p=0.9 is not part of the log-probabilities that a trainer recomputes (log_softmax(logits / T)), so "
     "its ratios would be wrong; set top_p: 1, or allow_mismatch: true if your trainer accounts for it"),
    ({"sampling": {"min_tokens": 3}},
     "sampling.min_tokens=3 forbids EOS at the start of a response, which a trainer's recomputed log-probabilities do "
     "not take into account; set min_tokens: 0, or allow_mismatch: true"),
    ({"sampling": {"temperature": 0}},
     "sampling.temperature=0 makes all samples of a group equal and gives no log-probabilities to train on; set a "
     "positive temperature, or allow_mismatch: true"),
    ({"max_in_flight": "auto"},
     "max_in_flight=auto has no effect with refill=none, where the number of groups in work decides; set refill: "
     "sample, or set over_sampling_batch_size: auto as well, so that april also chooses the refill"),
    ({"over_sampling_batch_size": "auto", "refill": "sample"},
     "over_sampling_batch_size=auto has no effect with refill=sample, where max_in_flight decides; leave it out and "
     "set max_in_flight: auto"),
    ({"max_in_flight": "auto", "refill": "group"},
     "max_in_flight=auto only works with refill: none and refill: sample, not with refill=group"),
    ({"group_quorum": "auto", "partial_rollout": False},
     "group_quorum=auto chooses how much is left over for the next step, but partial_rollout=false would throw those "
     "tokens away; set partial_rollout: true"),
    ({"max_off_policy_share": 0.5},
     "max_off_policy_share=0.5 limits what april chooses, but no setting is auto; set over_sampling_batch_size: auto, "
     "or leave out max_off_policy_share"),
    ({"engine": {"kind": "vllm"}},
     "engine.urls is required for engine.kind vllm: the addresses of the servers, such as http://127.0.0.1:8000"),
    ({"engine": {"kind": "vllm", "urls": URL, "slots": 3}},
     "engine.slots belongs to engine.kind transformers or simulated, not to vllm"),
    ({"engine": {"kind": "vllm", "urls": URL, "router": URL}},
     "engine.router belongs to engine.kind sglang, not to vllm"),
    ({"engine": {"kind": "simulated", "urls": [URL, "http://127.0.0.1:8001"]}},
     "engine.urls belongs to engine.kind vllm or sglang or openai or april, not to simulated"),
    ({"engine": {"kind": "sglang", "urls": [URL, "http://127.0.0.1:8001"], "colour": 1}},
     "engine.colour: unknown setting; engine.kind sglang has urls, api_key, api_key_env, max_in_flight, "
     "connect_timeout_s, probe_timeout_s, first_weights, max_token_loss, vocab_size, max_len, eos_token_ids, "
     "logprobs, model, expert_shape, routing_key, router"),
    ({"engine": {"kind": "vllm", "urls": "http://0.0.0.0:8000"}},
     "engine.urls.0: 0.0.0.0 in 'http://0.0.0.0:8000' is an address to listen on, to which no client can connect; "
     "write http://127.0.0.1:8000 if the server is on this machine, or else the name of its machine"),
    ({"engine": {"kind": "vllm", "urls": "https://[::]"}},
     "engine.urls.0: :: in 'https://[::]' is an address to listen on, to which no client can connect; write "
     "https://127.0.0.1 if the server is on this machine, or else the name of its machine"),
    ({"engine": {"kind": "vllm", "urls": [URL, "ftp://h"]}},
     "engine.urls.1: an engine's URL must look like http://host:port, got 'ftp://h'"),
    ({"engine": {"kind": "vllm", "urls": "http://h:8/v1"}},
     "engine.urls.0: an engine's URL must look like http://host:port, got 'http://h:8/v1'"),
    ({"engine": {"kind": "vllm", "urls": "http://h:8?key=1"}},
     "engine.urls.0: an engine's URL must look like http://host:port, got 'http://h:8?...'"),
    ({"engine": {"kind": "vllm", "urls": "http://u:pa/ss@h:8?key=1"}},
     "engine.urls.0: an engine's URL must look like http://host:port, got 'h:8?...'"),
    ({"engine": {"kind": "vllm", "urls": "http://h:8/?user=a@b"}},
     "engine.urls.0: an engine's URL must look like http://host:port, got '?...'"),
    ({"engine": {"kind": "vllm", "urls": URL, "api_key_env": "sk-key"}},
     "engine.api_key_env: the name of an environment variable has only letters, digits and _; give the name of the "
     "variable that holds the key, not the key itself"),
    ({"engine": {"kind": "vllm", "urls": "http://h:99999"}},
     "engine.urls.0: an engine's URL must look like http://host:port, got 'http://h:99999'"),
    ({"engine": {"kind": "vllm", "urls": ["http://h", "http://h/"]}},
     "engine.urls contains http://h twice; list each server once"),
    ({"engine": {"kind": "vllm", "urls": URL, "api_key": "key\n"}},
     "engine.api_key: the key of the server begins or ends with white space or a line break; remove that"),
    ({"engine": {"kind": "vllm", "urls": URL, "api_key": 5512345}}, "engine.api_key: input should be a valid string"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "sentence"), SETTINGS, ids=[next(iter(c)) for c, _ in SETTINGS])
def test_settings(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    """A ConfigError of exactly this sentence, from keywords, a mapping, OmegaConf and a file, which it names."""
    values = {name: value for name, value in (BASE | change).items() if value is not ...}
    file = tmp_path / "april.yaml"
    file.write_text(yaml.safe_dump(values), "utf-8")
    for make in (
        lambda: april.Config(**values),
        lambda: april.Config.from_mapping(values),
        lambda: april.Config.from_mapping(OmegaConf.create(values)),
        lambda: april.Config.from_yaml(file),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        assert str(caught.value).removeprefix(f"{file}: ") == sentence


def test_several_mistakes_are_all_named() -> None:
    """Nobody has to run three times to learn of three mistakes."""
    with pytest.raises(ConfigError, match=r"refill.*; seed.*; colour: unknown setting"):
        april.Config(**BASE, refill="x", seed=-1, colour="red")


@pytest.mark.parametrize("name", NAMES_ELSEWHERE)
def test_names_of_other_trainers_are_no_settings(name: str) -> None:
    """A name that april explains is not one that it has, and what it advises to set instead is there."""
    assert name not in april.Config.model_fields
    if " of the scheduler" not in (setting := NAMES_ELSEWHERE[name]):
        assert re.split("[,:]", setting)[0] in {known.path for known in settings_of()}


def test_a_directory_that_is_not_there_is_named() -> None:
    """And not looked for on the hub, which would speak of names of repositories."""
    config = april.Config(**BASE, engine={"kind": "transformers", "model": "/no/such/model"})
    with pytest.raises(ConfigError, match=r"engine\.model: there is no directory /no/such/model"):
        april.RolloutScheduler(config, prompts=[[1]], reward=graded)


# ---------------------------------------------------------------- flags

NEEDED = ["--rollout-batch-size", "8", "--max-response-len", "99"]
FLAGS: list[tuple[list[str], str]] = [
    ([], "--rollout-batch-size: is required; --max-response-len: is required"),
    ([*NEEDED, "--over-sampling-batch-size", "16", "--no-partial-rollout", "--max-staleness", "2"],
     "--max-staleness 2 lets tokens become older than their weights, but --no-partial-rollout with "
     "--over-sampling-batch-size 16 trains every batch with the weights that generated it; leave out --max-staleness, "
     "or set --partial-rollout"),
    ([*NEEDED, "--over-sampling-batch-size", "99"],
     "--over-sampling-batch-size 99 is too large: with --max-staleness 5 april can deliver 48 groups in time; raise "
     "--max-staleness or set --on-stale"),
    ([*NEEDED, "--sampling-top-p", "0.5"],
     "--sampling-top-p 0.5 is not part of the log-probabilities that a trainer recomputes (log_softmax(logits / T)), "
     "so its ratios would be wrong; set --sampling-top-p 1, or --allow-mismatch if your trainer accounts for it"),
    ([*NEEDED, "--engine-gpu", "h100"], "--engine-gpu belongs to --engine-kind simulated, not to transformers"),
    ([*NEEDED, "--engine-kind", "simulated", "--engine-model", "my-model"],
     "--engine-model: input should be 'r1-distill-1.5b', 'qwen3-4b' or 'qwen3-8b', got 'my-model'"),
    ([*NEEDED, "--engine-kind", "vllm"],
     "--engine-urls is required for --engine-kind vllm: the addresses of the servers, such as http://127.0.0.1:8000"),
    ([*NEEDED, "--engine-urls", URL],
     "--engine-urls belongs to --engine-kind vllm or sglang or openai or april, not to transformers"),
    ([*NEEDED, "--engine-kind", "vllm", "--engine-urls", URL, "--engine-slots", "3"],
     "--engine-slots belongs to --engine-kind transformers or simulated, not to vllm"),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "sentence"), FLAGS, ids=lambda x: x[:30] if isinstance(x, str) else "")
def test_flags(typed: list[str], sentence: str) -> None:
    """The configuration's own sentences, in the words of the command line."""
    parser = april.add_april_arguments(argparse.ArgumentParser())
    with pytest.raises(ConfigError) as caught:
        april.config_from_arguments(parser.parse_args(typed))
    assert str(caught.value) == sentence


TYPED: list[tuple[list[str], str]] = [
    (["--rollout-batch-size", "0"], "input should be greater than or equal to 1, got '0'"),
    (["--rollout-batch-size", "none"],
     "input should be a valid integer, unable to parse string as an integer, got 'none'"),
    (["--refill", "often"], "input should be 'none', 'group' or 'sample', got 'often'"),
    (["--sampling-temperature", "nan"], "input should be a finite number, got 'nan'"),
    (["--engine-urls", "localhost:8000"],
     "an engine's URL must look like http://host:port, got 'localhost:8000'"),
    (["--engine-urls", "http://user:password@host:80"],
     "an engine's URL must look like http://host:port, got 'host:80'"),
    (["--engine-api-key", "password"],
     "everybody on the machine can see flags; write the key into an environment variable, and give its name with the "
     "flag that ends in -env"),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "sentence"), TYPED, ids=" ".join)
def test_values_of_flags(typed: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    """parser.error with the flag, what is possible and what was typed, but for passwords."""
    with pytest.raises(SystemExit):
        april.add_april_arguments(argparse.ArgumentParser(prog="train")).parse_args(typed)
    printed = capsys.readouterr().err
    assert printed.strip().splitlines()[-1] == f"train: error: argument {typed[0]}: {sentence}"
    assert "password" not in printed


# ---------------------------------------------------------------- arguments and calls


class Untouched:
    """Prompts that nobody may draw from."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        pytest.fail("work has started")


async def graded(prompt: april.Prompt, response: Response) -> float:
    pytest.fail("work has started")


class NoPartials(SimulatedEngine):
    """Loses what an aborted request had."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, returns_partials=False)


def test_an_engine_without_partials_is_fine_when_nothing_is_cut() -> None:
    """With N' = N and refill none nothing is aborted at the end of a step."""
    with scheduler(engines=[engine(kind=NoPartials)], config=config(over_sampling_batch_size=3)) as rollouts:
        check(rollouts.next_batch())


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"config": BASE}, "config must be an april.Config, got dict; Config.from_mapping and Config.from_yaml make one"),
    ({"engines": "vllm"}, "engines must be a list of engine objects, got str"),
    ({"engines": engine()}, "engines must be a list of engine objects, got SimulatedEngine"),
    ({"engines": [engine(), "e1"]}, r"engines: str is not an engine \(april.engines.protocol.Engine\)"),
    ({"engines": []}, "engines: at least one engine is needed"),
    ({"engines": None}, ".*needs a model.*"),
    ({"engines": None, "model": object(), "config": config(engine={"kind": "simulated"})}, (
        ".*accepts no model obj.*"
    )),
    ({"engines": [engine("a"), engine("b"), engine("a")]}, r".*names must be unique, got \['a', 'b', 'a'\].*"),
    (
        {"engines": [engine("a"), engine("b", max_context=100)]},
        "max_response_len=100 leaves no room for a prompt: the context of engine b holds 100 tokens; .*",
    ),
    (
        {"engines": [engine(kind=NoPartials)]},
        "engine e0 returns no tokens of an aborted request.*set over_sampling_batch_size.*",
    ),
    (
        {"engines": [engine(kind=NoPartials)], "config": config(over_sampling_batch_size=3, refill="sample")},
        "engine e0 returns no tokens of an aborted request.*refill: none.*",
    ),
    ({"group_reward": graded}, "give reward or group_reward, not both"),
    ({"filter": True}, "filter must be a function, got bool"),
    ({"prompts": None}, "prompts must be an iterable of prompts, got NoneType"),
    (
        {"filter": april.rewards_differ, "reward": None},
        "filter=rewards_differ would reject every group; it needs a reward and n_samples_per_prompt above 1",
    ),
    (
        {"filter": april.rewards_differ, "config": config(n_samples_per_prompt=1)},
        "filter=rewards_differ would reject every group; it needs a reward and n_samples_per_prompt above 1",
    ),
    (
        {"config": config(epochs=2)},
        r"prompts can be iterated only once \(Untouched\), but several epochs are wanted; give a list or a data set, "
        "or an object whose __iter__ starts over",
    ),
    (
        {"config": config(sampling={"stop_token_ids": [VOCAB]})},
        "sampling.stop_token_ids: 1000 is outside the vocabulary of 1000 of engine e0",
    ),
]


@pytest.mark.parametrize(("change", "sentence"), ARGUMENTS, ids=[s[:30] for _, s in ARGUMENTS])
def test_arguments_of_the_scheduler(change: dict[str, Any], sentence: str) -> None:
    """Refused by the constructor with exactly this sentence: no thread, no prompt, no request."""
    with pytest.raises(ConfigError) as caught:
        scheduler(**({"prompts": Untouched(), "reward": graded} | change))
    assert re.fullmatch(sentence, str(caught.value)), str(caught.value)
    assert_nothing_is_left()


CALLS: list[tuple[Callable[[april.RolloutScheduler], Any], type[AprilError], str]] = [
    (lambda r: r.load_state_dict("x"), CheckpointError, r"this is not a state that april's state_dict\(\) returned"),
    *(
        (
            lambda r, batch=batch: r.state_dict(batch),
            CheckpointError,
            f"trained_through={batch!r} must be the id of a batch, or -1; the batches delivered so far are 0 to 0",
        )
        for batch in ("x", 7)
    ),
    (lambda r: r.weight_update(transfer=3), ConfigError, "weight_update: transfer must be a function, got int"),
    (lambda r: r.evaluate(None), ConfigError, "evaluate: prompts must be an iterable of prompts, got NoneType"),
    (lambda r: r.evaluate([]), ConfigError, "evaluate: there are no prompts"),
    (
        lambda r: r.evaluate([[1], [5000]]),
        ConfigError,
        "prompt 1: token id 5000 is outside the engine's vocabulary of 1000",
    ),
    *(
        (lambda r, name=name, value=value: r.evaluate([[1]], **{name: value}), ConfigError, f"evaluate: {words}")
        for name, value, words in (
            ("n_samples", "2", "n_samples must be a whole number and at least 1, got '2'"),
            ("n_samples", 0, "n_samples must be a whole number and at least 1, got 0"),
            ("max_tokens", 0, "max_tokens must be a whole number and at least 1, got 0"),
            ("seed", -1, "seed must be a whole number and at least 0, got -1"),
            ("temperature", "hot", "temperature must be a number, got 'hot'"),
            ("temperature", -1.0, "temperature must be a finite number .*"),
            ("top_p", 0.0, "top_p must be in .*"),
        )
    ),
    (
        lambda r: r.weight_update(lambda: None),
        ConfigError,
        "weight_update: path must be the name of a directory, got function; pass a function that hands over the "
        "weights as transfer=, and do not pass a model that the engine reads in place",
    ),
    (lambda r: r.extend(5), ConfigError, "prompts must be an iterable of prompts, got int"),
]


@pytest.mark.parametrize(("call", "error", "sentence"), CALLS, ids=[s[:40] for _, _, s in CALLS])
def test_arguments_of_calls(call: Callable[[Any], Any], error: type[AprilError], sentence: str) -> None:
    """Refused with exactly this sentence; the run goes on with equal books."""
    with scheduler() as rollouts:
        rollouts.next_batch()
        before = rollouts.version, rollouts.ledger()["prompts"].delivered
        with pytest.raises(error) as caught:
            call(rollouts)
        assert re.fullmatch(sentence, str(caught.value)), str(caught.value)
        assert (rollouts.version, rollouts.ledger()["prompts"].delivered) == before
        rollouts.weight_update()
        assert rollouts.next_batch().id == 1
        rollouts.validate()
    assert_nothing_is_left()
