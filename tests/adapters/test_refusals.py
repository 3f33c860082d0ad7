"""Wrong use of an adapter gives one sentence, in its trainer's own names, before anything is generated."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from real_schedulers import assert_nothing_is_left, engine
from tiny_models import tiny_model

import april
from adapters import openrlhf_stand_in as openrlhf
from adapters import slime_stand_in as slime
from adapters import stand_in_areal as areal
from adapters import stand_in_trl as trl
from adapters import stand_in_verl as verl
from april.adapters import trl as trl_adapter
from april.adapters.areal import settings as areal_checks
from april.adapters.areal.settings import config_of as config_of_areal
from april.adapters.common import installed_trainer as seams
from april.adapters.openrlhf import main
from april.adapters.openrlhf.arguments import config_of as config_of_openrlhf
from april.adapters.openrlhf.arguments import require_openrlhf
from april.adapters.slime import generate_rollout, make_generate_rollout
from april.adapters.trl.checks import require_trl
from april.adapters.verl import settings as verl_checks
from april.adapters.verl.settings import settings_of
from april.errors import AprilError, ConfigError

USER = "adapters.slime_functions_of_a_user"
ROLLOUT = "actor_rollout_ref__rollout__"
OVER = {"over_sampling_batch_size": 8}
URLS = {"kind": "vllm", "urls": ["http://127.0.0.1:1"]}
OTHERS = {**URLS, "kind": "openai"}
COLOCATED = SimpleNamespace(type="colocation", target="actor")
Changes = dict[str, Any]
Refuse = Callable[..., Any]


def refused(kind: Refuse, text: str, *arguments: Any, **options: Any) -> None:
    """``kind(...)`` is refused with a sentence of one line that has every part of ``text``, parted by `` .. ``."""
    with pytest.raises(AprilError) as error:
        kind(*arguments, **options)
    said = str(error.value)
    assert "\n" not in said
    assert all(part in said for part in text.split(" .. ")), said


# ---------------------------------------------------------------- settings


def trl_trainer(changes: Changes, own: Changes, tmp_path: Path) -> Any:
    trainer = trl_adapter.april_trainer(trl.GRPOTrainer)
    return trainer(tiny_model(), trl_adapter.rollout(trl.PARTIALS | own), trl.prompts(12), **changes)


def slime_rollout(changes: Changes, own: Any, tmp_path: Path, data: Any = None) -> Any:
    """One rollout, for some flags are read when a response is there."""
    with slime.installed():
        args = slime.namespace(**changes, april=own)
        made = make_generate_rollout([engine()], check=True)
        try:
            return made(args, 0, slime.DataSource(args) if data is None else data)
        finally:
            made.close()
            assert_nothing_is_left()


MAKE: dict[str, Refuse] = {
    "trl": trl_trainer,
    "openrlhf": lambda changes, own, tmp_path: config_of_openrlhf(openrlhf.namespace(**changes), own),
    "slime": slime_rollout,
    "verl": lambda changes, own, tmp_path: settings_of(
        verl.config(**changes, **{f"april__{name}": value for name, value in own.items()})
    ),
    "areal": lambda changes, own, tmp_path: config_of_areal(
        areal.config(tmp_path, **changes), own, groups=3, ranks=1
    ),
}
SIX = {"n_samples_per_prompt": 6}
MINE = {"custom_reward_post_process_path": f"{USER}.my_rewards"}
HOOKED = {"custom_reward_post_process_path": "april.adapters.slime.post_process_rewards"}
QUORUM = {"group_quorum": 0.5}
AGENT = {"rollout": f"{USER}.agent"}
GOES_ON = {"generation": "continuous"}
OWN_ESTIMATOR = {"algorithm__adv_estimator": "april_grpo"}
FILTERS = {"algorithm__filter_groups__enable": True}
REWARD_MODEL = {"reward__reward_model__enable": True}
MEAN_OVER = "takes the mean reward over whole ones; add --custom-reward-post-process-path"
WRONG: dict[str, list[tuple[Changes, Any, str]]] = {
    "trl": [
        ({}, {"on_failed_sample": "shrink"}, "a smaller group leaves TRL with fewer rows than"),
        ({}, {"n_samples_per_prompt": 4}, "=4 of april contradicts num_generations=2 of GRPOConfig"),
        ({}, {"rollout_batch_size": 3}, "rollout_batch_size=3 of april contradicts generation_batch_size /"),
        ({}, {"max_response_len": 9}, "max_response_len=9 of april contradicts max_completion_length=40"),
        ({}, {"sampling": {"temperature": 0.5}}, "sampling.temperature=0.5 of april contradicts temperature=1.0"),
        ({}, {"sampling": {"top_p": 0.9}}, "sampling.top_p=0.9 is not part of the log-probabilities"),
        ({}, {"sampling": {"top_p": 0.9}, "allow_mismatch": True}, "allow_mismatch: true: TRL recomputes"),
        ({}, {"epochs": 2}, "epochs=2, on_data_end=short: the trainer decides how long it trains"),
        ({}, {"on_data_end": "wait"}, "on_data_end to short or wrap"),
        ({}, {"engine": URLS, "weights": "disk"}, "through a directory (weights: disk); give rollout(weights_dir=...)"),
        ({}, {"engine": OTHERS}, "(servers of this kind accept no other weights); give rollout(weights_dir=...)"),
        ({}, {"engine": OTHERS, "weights": "collective"}, "(servers of this kind accept no other weights)"),
        ({"temperature": 0.0}, {}, "GRPOConfig.temperature=0: greedy samples"),
        ({"top_p": 0.9}, {}, "GRPOConfig.top_p=0.9: this is not part of the log-prob"),
        ({"top_k": 5}, {}, "GRPOConfig.top_k=5"),
        ({"min_p": 0.1}, {}, "GRPOConfig.min_p=0.1"),
        ({"repetition_penalty": 1.1}, {}, "GRPOConfig.repetition_penalty=1.1"),
        ({"generation_kwargs": {"typical_p": 0.2}}, {}, "generation_kwargs=['typical_p']"),
        ({"use_vllm": True}, {}, "use_vllm=True: april generates"),
    ],
    "openrlhf": [
        ({"vllm__num_engines": None}, {}, "--vllm.num_engines is missing or 0"),
        ({"data__max_images_per_prompt": 1, "train__agent_func_path": "a.py"}, {},
         "--data.max_images_per_prompt with --train.agent_func_path:"),
        ({"train__agent_func_path": "agent.txt"}, {}, "--train.agent_func_path agent.txt: expected a Python file"),
        ({"train__partial_rollout_enable": True}, {}, "--train.partial_rollout_enable: it changes weights in the"),
        ({"rollout__vllm_generate_batch_size": 8}, {}, "vllm_generate_batch_size is not --rollout.batch_size"),
        ({"rollout__vllm_generate_batch_size": 2}, {}, "vllm_generate_batch_size is not --rollout.batch_size"),
        ({"algo__advantage__is_correction_level": "off"}, {}, "is_correction_level is off (OpenRLHF's default)"),
        ({"rollout__top_p": 0.9}, {}, "--rollout.top_p 0.9: this is not part of the log-prob"),
        ({"rollout__temperature": 0.0}, {}, "--rollout.temperature 0: greedy samples of a group are all equal"),
        ({"rollout__max_new_tokens": 200}, {}, "--rollout.max_new_tokens 200: it leaves no room"),
        ({}, {"weights": "disk"}, "april.weights disk: OpenRLHF sends its weights"),
        ({}, {"allow_mismatch": True}, "april.allow_mismatch"),
        ({}, QUORUM, "april.group_quorum=0.5:  .. groups are delivered whole"),
        ({}, {"on_failed_sample": "shrink"}, "april.on_failed_sample=shrink:  .. so none may have fewer; use replace"),
        ({}, {"on_stale": "mask"}, "april.on_stale: mask"),
        ({}, {"sampling.top_p": 0.9}, "april.sampling.top_p: OpenRLHF's --rollout.temperature"),
        ({}, {"engine": {"kind": "vllm"}}, "april.engine: OpenRLHF's --vllm.num_engines"),
        ({}, {"max_chains": 2}, "april.max_chains: OpenRLHF's rows, one per sample, decides this"),
        ({"vllm__enable_sleep": True, "train__colocate_all": True}, GOES_ON,
         "--vllm.enable_sleep: the engines sleep on the"),
        ({"train__colocate_all": True}, GOES_ON, "--train.colocate_all: the engines sleep on"),
    ],
    "slime": [
        ({"partial_rollout": False}, {},
         "--over-sampling-batch-size 5: it starts more groups than --rollout-batch-size 3, and without --partial-roll"),
        ({"rollout_top_p": 0.9}, {}, "--rollout-top-p 0.9: the trainer would recompute log-probabilities other"),
        ({"rollout_temperature": 0.0}, {}, "--rollout-temperature 0: greedy samples of a group are all equal"),
        ({"rollout_top_k": 20}, {}, "--rollout-top-k 20: the trainer would recompute log-probabilities other"),
        ({"rollout_max_response_len": None}, {}, "--rollout-max-response-len is missing"),
        ({"rollout_global_dataset": False}, {}, "--disable-rollout-global-dataset: it leaves april without"),
        ({}, {"rollout_batch_size": 4}, "april.rollout_batch_size: slime's --rollout-batch-size decides"),
        (SIX, QUORUM,
         f"april.group_quorum=0.5: it delivers groups in parts, but slime {MEAN_OVER} "
         "april.adapters.slime.post_process_rewards"),
        ({**SIX, **MINE}, QUORUM, f"in parts, but {USER}.my_rewards {MEAN_OVER}"),
        ({**SIX, **MINE, "rewards_normalization": False}, QUORUM, f"in parts, but {USER}.my_rewards {MEAN_OVER}"),
        *(
            ({**SIX, **HOOKED, flag: "x"}, QUORUM, f"--{flag.replace('_', '-')}: it needs whole groups, but april.gr")
            for flag in ("group_rm", "log_passrate", "rollout_all_samples_process_path",
                         "custom_convert_samples_to_train_data_path")
        ),
        ({}, {"on_failed_sample": "shrink"}, "april.on_failed_sample=shrink: a batch would have fewer than"),
        ({}, "fast", "april: in --custom-config-path: expected a mapping of settings, got str"),
        ({"custom_rm_path": "nowhere.reward"}, {}, "slime cannot load nowhere.reward"),
        ({"custom_rm_path": f"{USER}.nothing"}, {}, f"slime cannot load {USER}.nothing"),
        ({"custom_generate_function_path": f"{USER}.one_argument"}, {}, "generate-function-path is called with (args"),
        ({"custom_rm_path": f"{USER}.two_rewards"}, {}, (
            "not a number; if there are several, choose one with --reward-key"
        )),
        ({"custom_generate_function_path": f"{USER}.several"}, {}, "custom generate function returned several samples"),
        ({"colocate": True}, GOES_ON, "--colocate: the engines sleep while the trainer trains"),
        ({"offload_rollout": True}, GOES_ON, "--offload-rollout: the engines sleep while the trainer trains"),
        ({"custom_generate_function_path": f"{USER}.over_http"}, GOES_ON, "-generate-function-path: it sends its"),
        ({}, AGENT, "april.rollout .. slime takes the mean reward over rows; add --custom-reward-post-process-path"),
        ({**HOOKED, "use_dynamic_batch_size": False}, AGENT, "slime's micro-batches  .. add --use-dynamic-batch-size"),
        ({**HOOKED, "rollout_sample_hook_path": [f"{USER}.mark"]}, AGENT, "hook-path would see only the first; leave"),
        ({**HOOKED, "log_passrate": True}, AGENT, "several rows for one response, but --log-passrate takes n per grou"),
        ({**HOOKED, "custom_generate_function_path": f"{USER}.generate"}, AGENT, "both generate the responses; leave"),
        ({}, {"rollout": 7}, "slime cannot load 7"),
        (HOOKED, {"rollout": f"{USER}.generate"}, "april.rollout"),
    ],
    "verl": [
        ({"algorithm__rollout_correction__rollout_is": None}, {},
         "algorithm.rollout_correction.rollout_is=null: verl recomputes old log-probabilities with the current weig"),
        ({}, QUORUM,
         "april.group_quorum=0.5: it delivers groups in parts, but algorithm.adv_estimator=grpo compares rows of the "
         "same batch"),
        ({**OWN_ESTIMATOR, f"{ROLLOUT}n": 6, "algorithm__use_kl_in_reward": True}, QUORUM,
         "algorithm.use_kl_in_reward=True: it changes rewards that"),
        ({**OWN_ESTIMATOR, **REWARD_MODEL}, {},
         "algorithm.adv_estimator=april_grpo: it needs a reward as soon as a response is finished"),
        ({f"{ROLLOUT}top_p": 0.9}, {}, "actor_rollout_ref.rollout.top_p=0.9: this is not part of the log"),
        ({f"{ROLLOUT}top_k": 20}, {}, "actor_rollout_ref.rollout.top_k=20: this is not part of the log-probabilities"),
        ({f"{ROLLOUT}temperature": 0}, {}, "temperature=0: greedy samples of a group are all equal"),
        ({f"{ROLLOUT}logprobs_mode": "raw_logprobs", f"{ROLLOUT}temperature": 0.8}, {},
         "actor_rollout_ref.rollout.logprobs_mode=raw_logprobs: it ignores the temperature"),
        ({f"{ROLLOUT}calculate_log_probs": False}, {}, "rollout.calculate_log_probs=False: tokens of older"),
        ({}, {"extras": "routed_experts"}, "verl's actor_rollout_ref.rollout.enable_rollout_routing_replay decides"),
        ({"trainer__v1__trainer_mode": "sync"}, {}, "trainer.v1.trainer_mode=sync: april continues"),
        ({"trainer__use_v1": False}, {}, "trainer.use_v1=False, trainer.v1.trainer_mode=colocate_async: april conti"),
        ({"skip__rollout_tq__enable": True}, {}, "skip.rollout_tq.enable=True: it replays stored rollouts"),
        ({"algorithm__adv_estimator": "remax"}, {}, "algorithm.adv_estimator=remax: it mixes greedy samples"),
        ({**FILTERS, **REWARD_MODEL}, {}, "algorithm.filter_groups: it needs rewards as soon as a group is finished"),
        ({**FILTERS, "algorithm__filter_groups__metric": None}, {}, "enable=True: it needs algorithm.filter"),
        ({}, {"rollout_batch_size": 4}, "april.rollout_batch_size: verl's data.train_batch_size decides this"),
        ({}, GOES_ON, "april.generation: verl's trainer.v1.trainer_mode decides this"),
        ({"april": "fast"}, {}, "april: expected a mapping of settings, got str"),
        ({f"{ROLLOUT}name": "trtllm"}, {}, "name=trtllm: verl's TensorRT-LLM servers replace the token limit of every"),
        ({}, {"max_chains": 2}, "april.max_chains: verl's rows, one per sample, decides this"),
    ],
    "areal": [
        ({}, {"rollout_batch_size": 4}, "april['rollout_batch_size']: AReaL's train_dataset.batch_size decides this"),
        ({}, QUORUM, "april['group_quorum']=0.5: AReaL takes rewards over whole groups"),
        ({}, {"on_failed_sample": "shrink"}, "AReaL takes rewards over groups  .. may have fewer; use replace"),
        ({"rollout__scheduling_strategy": COLOCATED}, GOES_ON,
         "so the servers sleep while the"),
        ({"rollout___version": "v2"}, {}, "rollout._version and actor._version: v2 generates behind a gateway"),
        ({"dynamic_bs": True}, {}, "dynamic_bs: batches would be shortened by the groups that the filter rejects"),
        ({"rollout__use_lora": True}, {}, "use_lora: AReaL trains adapters only in its single-controller mode"),
        ({"rollout__agent": SimpleNamespace(mode="online")}, {}, "rollout.agent.mode: online has no prompts"),
        ({"gconfig__greedy": True}, {}, "greedy samples of a group are all equal"),
        ({"gconfig__use_beam_search": True}, {}, "beams have no log-probability"),
        ({"rollout__backend": "vllm:d1", "gconfig__temperature": 0.8}, {},
         "gconfig.temperature=0.8 with rollout.backend=vllm:d1: vLLM's log-probabilities ignore the temperature"),
        ({"gconfig__top_p": 0.9}, {}, "gconfig.top_p=0.9: this is not part of the log-probabilities"),
        ({"gconfig__top_k": 20}, {}, "gconfig.top_k=20: this is not part of the log-probabilities"),
        ({"gconfig__frequency_penalty": 0.1}, {}, "gconfig.frequency_penalty=0.1: this is not part"),
        ({"actor__recompute_logprob": True, "actor__use_decoupled_loss": False}, {},
         "actor.recompute_logprob without actor.use_decoupled_loss: log-probabilities of the"),
        ({"actor__rejection_sampling": None}, {}, "actor.use_decoupled_loss without actor.rejection_sampling: tokens"),
    ],
}  # fmt: skip
for rows_of_trainer in WRONG.values():
    # no trainer divides the logits of each row by another temperature, or knows what a grammar has allowed
    rows_of_trainer += [({}, {"sampling_of_clients": "client"}, "sampling_of_clients")]
    rows_of_trainer += [({}, {"constraints": "enforce"}, "constraints")]


@pytest.mark.parametrize(
    ("trainer", "changes", "own", "sentence"),
    [pytest.param(kind, *row, id=f"{kind}: {row[2][:50]}") for kind, rows in WRONG.items() for row in rows],
)
def test_settings_that_cannot_be_right(
    trainer: str, changes: Changes, own: Any, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence names the trainer's own setting, or april's, and what to do."""
    monkeypatch.setattr("april.config.settings.RETRY_PAUSE_S", 0.0)
    refused(MAKE[trainer], sentence, changes, own, tmp_path)


def test_what_is_right_beside_it(tmp_path: Path) -> None:
    """Settings of april in slime's custom config; engines that sleep without continuous, or not in this trainer."""
    assert len(slime_rollout({}, {"max_staleness": 2, "refill": "sample"}, tmp_path).samples) == 3
    sleep = {"vllm__enable_sleep": True, "train__colocate_all": True}
    MAKE["openrlhf"](sleep, OVER, tmp_path)
    beside = {"train__colocate_all": True, "train__async_enable": True}
    MAKE["openrlhf"](beside, {**OVER, "generation": "continuous"}, tmp_path)


# ---------------------------------------------------------------- trainers that are missing, or others


def take(name: str) -> Refuse:
    """Takes the trainer's class from april's adapter."""
    module, _, attribute = name.rpartition(".")
    return lambda: getattr(importlib.import_module(f"april.adapters.{module}"), attribute)


@pytest.mark.parametrize(("take", "sentence"), [
    (take("trl.AprilGRPOTrainer"), "pip install trl==1.16.0"),
    (require_trl, "needs trl .. its import failed"),
    (take("areal.PPOTrainer"), "AReaL, which is not installed here: pip install areal==1.0.4"),
    *((take(f"verl.{name}"), "april.adapters.verl needs verl: pip install verl==0.9.1")
      for name in ("AgentLoopManager", "Checkpoints", "Sampler")),
    (require_openrlhf, "april.adapters.openrlhf runs OpenRLHF, which is not installed here"),
    (lambda: generate_rollout(slime.namespace(), 0, object()),
     "is called by slime or miles  .. neither is on PYTHONPATH"),
])  # fmt: skip
def test_without_its_trainer_an_adapter_says_what_to_install(
    take: Refuse, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sentence; the adapters themselves can be imported."""
    for name in ("trl", "areal", "verl", "openrlhf"):
        monkeypatch.setitem(sys.modules, name, None)
    refused(take, sentence)


@pytest.mark.parametrize("name", ["trl.AprilPPOTrainer", "areal.Trainer", "verl.Smapler"])
def test_names_that_an_adapter_does_not_have(name: str) -> None:
    """As of any module."""
    with pytest.raises(AttributeError, match=f"no attribute {name.partition('.')[2]!r}"):
        take(name)()


def test_importing_adapters_loads_no_trainer() -> None:
    """Nor torch or Ray; what verl's driver and workers run by is imported here, too."""
    names = (
        "trl", "areal", "verl", "openrlhf", "slime", "common", "verl.agent_calls", "verl.rollouts", "verl.settings"
    )  # fmt: skip
    code = f"""import importlib, sys
for name in {[f"april.adapters.{name}" for name in names]}:
    importlib.import_module(name)
assert not {{"trl", "torch", "transformers", "areal", "verl", "openrlhf", "slime", "ray"}} & set(sys.modules)"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_openrlhfs_command_ends_with_a_sentence() -> None:
    """And a status, where OpenRLHF is missing, and where a flag is wrong."""
    command = [sys.executable, "-m", "april.adapters.openrlhf", "--train.seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("april: april.adapters.openrlhf runs OpenRLHF, which is not installed here")
    assert done.stderr.count("\n") == 1
    with pytest.raises(SystemExit, match=r"april: --april\.config needs a value"):
        main(["--april.config"])


class Renamed(trl.GRPOTrainer):
    def _tokenize_prompts(self, prompts: list[Any], images: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError


class Moved(openrlhf.SamplesGenerator):
    def _generate_vllm(  # type: ignore[override]
        self, dataloader_iter: Any, num_prompts: int, dynamic_filtering: Any, more: Any, **generate_kwargs: Any
    ) -> Any:
        raise NotImplementedError


class Changed(areal.WorkflowExecutor):
    def pause(self, hard: bool) -> None:  # type: ignore[override]
        raise NotImplementedError


class Gone:
    """Has none of what is needed."""


async def other_reward(sample: Any) -> float:
    return 0.0


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Every trainer's stand-in where the trainer would be; of verl one class."""
    areal.install(monkeypatch)
    there = ModuleType("verl.stand_in")
    there.A = type("A", (), {"sample": lambda self, steps: None})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
    monkeypatch.setitem(sys.modules, "verl.stand_in", there)
    monkeypatch.setattr(seams, "version_of", lambda package: "0.9.7")
    monkeypatch.setattr(verl_checks, "REQUIRED_FUNCTIONS", {"verl.stand_in:A.sample": ("self", "steps")})
    with openrlhf.installed(), slime.installed():
        yield monkeypatch


def slime_session() -> Any:
    args, made = slime.namespace(), make_generate_rollout([engine()])
    try:
        return made(args, 0, slime.DataSource(args))
    finally:
        made.close()


EXECUTOR = "areal.infra.workflow_executor.WorkflowExecutor"
RM = "slime.rollout.rm_hub.async_rm"
VERL_SEAMS = "april.adapters.verl.settings.REQUIRED_FUNCTIONS"


@pytest.mark.parametrize(("place", "other", "look", "sentence"), [
    ("adapters.stand_in_trl.GRPOTrainer", Renamed, lambda: trl_adapter.april_trainer(trl.GRPOTrainer),
     "_tokenize_prompts of trl  .. takes ( .. images), but  .. trl==1.16.0"),
    ("openrlhf.trainer.ppo_utils.samples_generator.SamplesGenerator", Moved, require_openrlhf,
     "_generate_vllm of openrlhf  .. takes ( .. more .. ), but april's adapter needs"),
    ("openrlhf.utils.agent.SingleTurnAgentExecutor", Gone, require_openrlhf,
     "_fetch_rewards_via_func of  .. is not there"),
    (EXECUTOR, Changed, areal_checks.require_areal, "WorkflowExecutor.pause of areal  .. takes (self, hard)"),
    (EXECUTOR, None, areal_checks.require_areal, "is not there, but april's adapter needs"),
    (VERL_SEAMS, {"verl.stand_in:A.sample": ("self", "global_steps")}, verl_checks.require_verl,
     "A.sample of verl 0.9.7 takes (self, steps), but  .. needs"),
    (VERL_SEAMS, {"verl.stand_in:A.wait": ("self",)}, verl_checks.require_verl, "A.wait of verl 0.9.7 is not there"),
    (RM, None, slime_session, "slime has no rollout.rm_hub.async_rm .. tried with slime 624b824"),
    (RM, other_reward, slime_session,
     "async_rm is called with (args, sample), but other_reward(sample) does not accept that"),
], ids=lambda value: value[-50:] if isinstance(value, str) else None)  # fmt: skip
def test_functions_that_have_moved(
    place: str, other: Any, look: Refuse, sentence: str, all_installed: pytest.MonkeyPatch
) -> None:
    """The first function that is gone, or takes something else, is named: trainers promise none of their internals."""
    look()
    module, _, name = place.rpartition(".")
    if other is None:
        all_installed.delattr(sys.modules[module], name)
    else:
        all_installed.setattr(sys.modules[module], name, other)
    refused(look, sentence)


def test_areals_single_controller_mode_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """AReaL's default; the sentence says how to leave it."""
    areal.install(monkeypatch, spmd=False)
    trainer = take("areal.PPOTrainer")()
    refused(trainer, "start the run in SPMD mode: AREAL_SPMD_MODE=1", areal.config(tmp_path), areal.rows())


# ---------------------------------------------------------------- data and models


class Given(slime.DataSource):
    """Gives one group for ever."""

    def __init__(self, group: list[Any]) -> None:
        super().__init__(slime.namespace())
        self.get_samples = lambda num_samples: [group] * num_samples  # type: ignore[method-assign]


def slime_samples(count: int = 2, prompt: Any = "p1", **fields: Any) -> list[Any]:
    return [slime.Sample(0, i, prompt, **fields) for i in range(count)]


@pytest.mark.parametrize(("group", "said"), [
    ([object(), object()], "a sample of the data source (object) has no index, prompt"),
    (slime_samples(1), "the data source returned a group of 1 samples, but --n-samples-per-prompt is 2"),
    (slime_samples(prompt=[{"role": "user"}]), "is not text; add --apply-chat-template"),
    (slime_samples(multimodal_inputs={"images": [1]}), "name it in --multimodal-keys"),
    (slime_samples(multimodal_inputs={"images": None, "videos": [1]}),
     "has videos, but april only supports text and images"),
])  # fmt: skip
def test_groups_of_slime_that_cannot_be_used(group: list[Any], said: str, tmp_path: Path) -> None:
    """What a data source of the user's own may get wrong."""
    refused(slime_rollout, said, {}, {}, tmp_path, Given(group))


PLAIN = trl_adapter.april_trainer(trl.GRPOTrainer)
PROMPTS = trl.prompts(4)
FOURS: Changes = {"num_generations": 4, "generation_batch_size": 8}
MODEL: Changes = {**FOURS, "reward_funcs": [torch.nn.Linear(1, 1)]}
SUMS: Changes = {**FOURS, "multi_objective_aggregation": "normalize_then_sum"}
DIFFER: Changes = {"filter": april.rewards_differ}
SHOWN = trl.Rows([{"prompt": [{"role": "user", "content": [{"type": "image", "image": "1.png"}]}]}])


class Room:
    """An environment of one tool."""

    def look(self) -> str:
        return "nothing"




@pytest.mark.parametrize(("data", "rollout", "options", "sentence"), [
    (iter([]), {}, {}, "list_iterator, which cannot be read row by row"),
    (trl.Rows([{"prompt": "1", "image": 0}]), {}, {}, "column image, but processing_class (Words) reads no images"),
    (PROMPTS, {}, {"sees": True, "environment_factory": Room}, "environment_factory with a vision model"),
    (PROMPTS, {}, {"sees": True, "tools": [print]}, "tools with a vision model"),
    (SHOWN, {}, {"sees": True}, "an image in its messages: TRL leaves it out of its loss"),
    (PROMPTS, {}, {"environment_factory": Room, **MODEL}, "environment_factory: only TRL computes rewards by a model"),
    (PROMPTS, {"weights_dir": "somewhere"}, {}, "weights_dir is for servers"),
    (PROMPTS, {"group_quorum": 0.75}, SUMS, "normalises each reward function over whole groups"),
    (PROMPTS, {"group_quorum": 0.75}, MODEL, "group_quorum below 1: only TRL computes rewards by a model"),
    (PROMPTS, {**DIFFER, "on_data_end": "wrap"}, MODEL, "filter: only TRL computes rewards by a model"),
    (PROMPTS, DIFFER, {}, "filter:  .. set on_data_end: wrap"),
])  # fmt: skip
def test_what_trls_trainer_may_have_that_april_cannot_be_exact_with(
    data: Any, rollout: Changes, options: Changes, sentence: str
) -> None:
    """Streams, images, rewards that need whole groups, and a directory for weights that nobody reads."""
    refused(PLAIN, sentence, tiny_model(), trl_adapter.rollout(**rollout), data, **options)


def test_some_adapters_of_peft_are_refused() -> None:
    """Quantised bases, virtual tokens, and for servers those of layers that are one tensor."""
    model, servers = tiny_model(), {"weights_dir": "nowhere", "engine": URLS}

    def attach(**rollout: Any) -> Any:
        return PLAIN(model, trl_adapter.rollout(**rollout), PROMPTS)

    model.peft_config = {"default": SimpleNamespace(is_prompt_learning=False)}
    attach()
    attach(**servers)
    model.config.tie_word_embeddings, model.get_output_embeddings().base_layer = True, None
    attach()
    attach(**servers)  # which may take the adapter as such
    others = servers | {"engine": OTHERS}
    refused(attach, "the embedding or the output layer, which are tied", **others)
    model.config.quantization_config = SimpleNamespace(quant_method="bitsandbytes")
    refused(attach, "PEFT model over a quantised base")
    del model.config.quantization_config
    model.peft_config["soft"] = SimpleNamespace(is_prompt_learning=True)
    refused(attach, "PEFT adapter soft is of the kind prompt learning")


def test_the_two_halves_of_trls_adapter_need_each_other() -> None:
    """A plain GRPOTrainer would train stale tokens uncorrected; the subclass needs april's rollouts."""
    plain = trl.GRPOTrainer(tiny_model(), trl_adapter.rollout(), PROMPTS)
    refused(plain.train, "this rollout_func needs AprilGRPOTrainer", steps=1)
    refused(PLAIN, "AprilGRPOTrainer needs rollout_func=", tiny_model(), print, PROMPTS)
    with pytest.raises(ConfigError, match="belongs to no trainer yet"):
        _ = trl_adapter.rollout().config
