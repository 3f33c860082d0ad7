"""One frozen configuration from four kinds of source; one sentence for every mistake in it."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
import yaml
from omegaconf import OmegaConf
from pydantic import ValidationError
from real_schedulers import scheduler

import april
from april.config.engines import SimulatedEngineConfig, TransformersEngineConfig
from april.config.flags import settings_of
from april.config.settings import Config
from april.config.values import LONGEST_S, MOST
from april.core.sampling import SamplingParams
from april.core.types import OnLongPrompt, OnStale, Refill
from april.engines.kinds.factory import create_engines
from april.engines.simulated.engine import SimulatedEngine
from april.errors import ConfigError

SMALL: dict[str, Any] = {"rollout_batch_size": 32, "max_response_len": 1000}
FULL: dict[str, Any] = {
    "rollout_batch_size": 32,
    "n_samples_per_prompt": 4,
    "over_sampling_batch_size": 48,
    "partial_rollout": True,
    "max_response_len": 16384,
    "refill": "group",
    "max_in_flight": 100,
    "sampling": {"temperature": 0.7, "top_p": 0.9, "min_tokens": 2, "stop_token_ids": [5, 6]},
    "max_staleness": 3,
    "on_stale": "restart",
    "on_long_prompt": "skip",
    "max_held_tokens": 1_000_000,
    "max_attempt_failures": 5,
    "abort_deadline_s": 12,
    "abort_resend_s": 0.5,
    "allow_mismatch": True,
    "seed": 7,
    "engine": {"kind": "simulated", "count": 2, "gpu": "mi300x", "max_len": 30000},
}


def write(path: Path, values: Any) -> Path:
    path.write_text(yaml.safe_dump(values), "utf-8")
    return path


def test_four_sources_give_the_same_configuration(tmp_path: Path) -> None:
    """Keyword arguments, a mapping, an OmegaConf container and a YAML file: one and the same frozen Config."""
    config = Config(**FULL)
    others = [
        Config.from_mapping(FULL),
        Config.from_mapping(MappingProxyType(FULL)),
        Config.from_mapping(OrderedDict(reversed(FULL.items()))),
        Config.from_mapping(OmegaConf.create(FULL)),
        Config.from_mapping(OmegaConf.create({"n": 4, "april": {**FULL, "n_samples_per_prompt": "${n}"}}).april),
        Config.from_yaml(write(tmp_path / "full.yaml", FULL)),
        Config.from_yaml(str(tmp_path / "full.yaml")),
    ]
    assert all(other == config for other in others)
    assert len({hash(other) for other in others} | {hash(config)}) == 1
    assert config.refill is Refill.GROUP
    assert config.on_stale is OnStale.RESTART
    assert config.on_long_prompt is OnLongPrompt.SKIP
    assert config.sampling.stop_token_ids == (5, 6)
    assert isinstance(config.engine, SimulatedEngineConfig)
    assert config.abort_deadline_s == 12.0


def test_it_is_frozen() -> None:
    """Nothing in it can be changed after it was checked."""
    config = Config(**FULL)
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 8
    with pytest.raises(ValidationError, match="frozen"):
        config.sampling.temperature = 2.0
    with pytest.raises(ValidationError, match="frozen"):
        config.engine.count = 3


def test_every_setting_reaches_the_core() -> None:
    """What the user typed is what the core gets, under the same name."""
    settings = Config(**FULL).core_settings(has_reward=True, group_reward=True, run_id=99)
    for name in (
        "rollout_batch_size", "n_samples_per_prompt", "over_sampling_batch_size", "max_response_len", "max_in_flight",
        "refill", "max_staleness", "on_stale", "on_long_prompt", "max_held_tokens", "max_attempt_failures",
        "abort_deadline_s", "abort_resend_s",
    ):  # fmt: skip
        assert getattr(settings, name) == FULL[name], name
    assert (settings.run_seed, settings.run_id, settings.has_reward, settings.group_reward) == (7, 99, True, True)
    assert Config(**FULL).sampling_params() == SamplingParams(16384, 2, 0.7, 0.9, (5, 6), None)


@pytest.mark.parametrize(
    ("n", "over", "cap", "in_work", "in_flight"),
    [(4, None, None, 4, 8), (4, 6, None, 6, 12), (4, 3, None, 3, 12), (5, 2, None, 2, 12), (4, 6, 7, 6, 7)],
)
def test_places(n: int, over: int | None, cap: int | None, in_work: int, in_flight: int) -> None:
    """N' defaults to N; the in-flight cap to max(N, N') * n, or what the portions that reach N come to."""
    config = Config(
        rollout_batch_size=n, n_samples_per_prompt=2, over_sampling_batch_size=over, max_in_flight=cap,
        max_response_len=10,
    )  # fmt: skip
    assert (config.groups_in_work, config.samples_in_flight) == (in_work, in_flight)


@pytest.mark.parametrize(
    ("over", "more", "leaves", "started"),
    [
        (None, {}, False, 5), (5, {}, False, 5), (1, {}, False, 5), (3, {}, True, 6), (8, {}, True, 8),
        (None, {"refill": "group"}, True, 5), (3, {"partial_rollout": False}, False, 5),
    ],
)  # fmt: skip
def test_what_leaves_partials(over: int | None, more: dict[str, Any], leaves: bool, started: int) -> None:
    """Portions that come to more than N leave unfinished responses like N' > N; without partial_rollout none do."""
    config = Config(rollout_batch_size=5, over_sampling_batch_size=over, max_response_len=10, **more)
    assert config.leaves_partials is leaves
    assert config.core_settings(has_reward=True, group_reward=False, run_id=0).groups_wanted == started
    assert config.samples_in_flight == started * 8


# ---------------------------------------------------------------- mistakes

MISTAKES: list[tuple[dict[str, Any], list[str]]] = [
    # unknown, missing
    ({"rolout_batch_size": 3}, ["rolout_batch_size: unknown setting", "do you mean rollout_batch_size?"]),
    ({"sampling": {"top_q": 5}}, ["sampling.top_q: unknown setting"]),
    ({"sampling": {"top_k": 5}}, ["sampling.top_k: changes the distribution"]),
    ({"n": 5}, ["n: every sample of a group is a request of its own; set n_samples_per_prompt"]),
    ({"sampling": {"stop": ["a", ""]}}, ["sampling.stop: an empty stop string would end every response"]),
    ({"sampling": {"stop": "\ufffd"}}, ["sampling.stop: the stop string '\ufffd' has U+FFFD in it"]),
    ({"sampling": {"stop": [3]}}, ["sampling.stop.0: input should be a valid string"]),
    ({"engine": {"kind": "simulated", "gpus": 2}}, ["engine.gpus: unknown setting"]),
    ({"rollout_batch_size": ...}, ["rollout_batch_size: is required"]),
    ({"max_response_len": ...}, ["max_response_len: is required"]),
    # wrong type
    ({"rollout_batch_size": "many"}, ["rollout_batch_size", "valid integer", "'many'"]),
    ({"rollout_batch_size": 1.5}, ["rollout_batch_size", "fractional part", "1.5"]),
    ({"rollout_batch_size": True}, ["rollout_batch_size: must be a number, got True"]),
    ({"seed": False}, ["seed: must be a number, got False"]),
    ({"abort_deadline_s": True}, ["abort_deadline_s: must be a number, got True"]),
    ({"sampling": {"temperature": True}}, ["sampling.temperature: must be a number"]),
    ({"rollout_batch_size": None}, ["rollout_batch_size", "valid integer"]),
    ({"partial_rollout": "perhaps"}, ["partial_rollout", "valid boolean", "'perhaps'"]),
    ({"sampling": 3}, ["sampling", "mapping", "3"]),
    ({"sampling": {"stop_token_ids": 5}}, ["sampling.stop_token_ids", "valid tuple"]),
    ({"sampling": {"stop_token_ids": [1, "x"]}}, ["sampling.stop_token_ids.1", "valid integer"]),
    ({"engine": "vllm"}, ["engine", "mapping", "vllm"]),
    # out of range
    ({"rollout_batch_size": 0}, ["rollout_batch_size", "greater than or equal to 1", "got 0"]),
    ({"max_staleness": -1}, ["max_staleness", "greater than or equal to 0"]),
    ({"abort_deadline_s": 0}, ["abort_deadline_s", "greater than 0"]),
    ({"abort_resend_s": float("inf")}, ["abort_resend_s", "finite"]),
    ({"seed": -1}, ["seed", "greater than or equal to 0"]),
    ({"refill": "always"}, ["refill", "'none', 'group' or 'sample'", "'always'"]),
    ({"on_stale": "panic"}, ["on_stale", "'finish', 'restart', 'mask' or 'drop'"]),
    ({"on_long_prompt": "cut"}, ["on_long_prompt", "'error' or 'skip'"]),
    ({"sampling": {"temperature": -0.1}}, ["sampling.temperature", "greater than or equal to 0"]),
    ({"sampling": {"temperature": float("nan")}}, ["sampling.temperature", "finite"]),
    ({"sampling": {"top_p": 0}}, ["sampling.top_p", "greater than 0"]),
    ({"sampling": {"top_p": 1.1}}, ["sampling.top_p", "less than or equal to 1"]),
    ({"sampling": {"top_p": float("nan")}}, ["sampling.top_p"]),
    ({"sampling": {"stop_token_ids": [-1]}}, ["sampling.stop_token_ids.0", "greater than or equal to 0"]),
    ({"engine": {"kind": "simulated", "slots": 0}}, ["engine.slots", "greater than or equal to 1"]),
    ({"engine": {"kind": "simulated", "sigma_within": float("inf")}}, ["engine.sigma_within", "finite"]),
    ({"engine": {"kind": "transformers", "slots": 0}}, ["engine.slots", "greater than or equal to 1"]),
    ({"engine": {"kind": "simulated", "gpu": "b200"}}, ["engine.gpu", "'h100' or 'mi300x'"]),
    # engine kinds
    ({"engine": {"kind": "llamacpp"}}, ["engine.kind", "'llamacpp'", "'transformers', 'simulated', 'vllm', 'sglang'"]),
    ({"engine": {"slots": 3}}, ["engine.kind: is required"]),
    # contradictions
    (
        {"over_sampling_batch_size": 48, "partial_rollout": False},
        ["over_sampling_batch_size=48", "rollout_batch_size=32", "set partial_rollout: true"],
    ),
    (
        {"over_sampling_batch_size": 100, "max_staleness": 2},
        ["over_sampling_batch_size=100", "max_staleness=2", "which is 96", "raise max_staleness or set on_stale"],
    ),
    (
        {"refill": "sample", "partial_rollout": False},
        ["refill=sample", "partial_rollout=false", "set partial_rollout: true or refill: none"],
    ),
    (
        {"sampling": {"min_tokens": 1000}, "allow_mismatch": True},
        ["sampling.min_tokens=1000", "below max_response_len=1000"],
    ),
    ({"abort_resend_s": 31}, ["abort_resend_s=31", "longer than abort_deadline_s=30"]),
    ({"sampling": {"top_p": 0.9}}, ["sampling.top_p=0.9", "recomputes", "set top_p: 1", "allow_mismatch: true"]),
    ({"sampling": {"min_tokens": 3}}, ["sampling.min_tokens=3", "set min_tokens: 0", "allow_mismatch: true"]),
    ({"sampling": {"temperature": 0}}, ["sampling.temperature=0", "positive temperature", "allow_mismatch: true"]),
]


@pytest.mark.parametrize(("change", "words"), MISTAKES, ids=lambda x: str(x)[:50])
@pytest.mark.parametrize("source", ["keywords", "omegaconf", "yaml"])
def test_one_sentence_names_the_setting_and_what_to_do(
    change: dict[str, Any], words: list[str], source: str, tmp_path: Path
) -> None:
    """From whichever source: a ConfigError of one line with the setting's name, what is wrong and what is possible."""
    values = {name: value for name, value in {**SMALL, **change}.items() if value is not ...}
    load: Callable[[], Config] = {
        "keywords": lambda: Config(**values),
        "omegaconf": lambda: Config.from_mapping(OmegaConf.create(values)),
        "yaml": lambda: Config.from_yaml(write(tmp_path / "april.yaml", values)),
    }[source]
    with pytest.raises(ConfigError) as caught:
        load()
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert "pydantic" not in message
    if source == "yaml":
        assert message.startswith(str(tmp_path / "april.yaml"))


def test_several_mistakes_are_all_named() -> None:
    """Nobody has to run three times to learn of three mistakes."""
    with pytest.raises(ConfigError, match=r"refill.*; seed.*; colour: unknown setting"):
        Config(**SMALL, refill="x", seed=-1, colour="red")


@pytest.mark.parametrize(
    ("values", "words"),
    [([1, 2], "list"), (None, "NoneType"), ("a: 1", "str"), (OmegaConf.create([1]), "list")],
)
def test_something_else_than_a_mapping(values: Any, words: str) -> None:
    """The sentence says what was given."""
    with pytest.raises(ConfigError, match=f"expected a mapping of settings, got {words}"):
        Config.from_mapping(values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_samples_per_prompt": "???"}, "n_samples_per_prompt"),
        ({"engine": {"kind": "transformers", "model": "???"}}, "Missing mandatory value.*engine.model"),
        ({"n_samples_per_prompt": "${nowhere}"}, "nowhere"),
    ],
    ids=str,
)
def test_unresolved_omegaconf_values(change: dict[str, Any], words: str) -> None:
    """A mandatory value that is missing or an interpolation that leads nowhere is a ConfigError that names it."""
    with pytest.raises(ConfigError, match=words) as caught:
        Config.from_mapping(OmegaConf.create({**SMALL, **change}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("!!python/object/apply:os.system ['exit 1']", "python/object/apply"),
        ("rollout_batch_size: !!python/object:collections.Counter {}", "python/object"),
        ("rollout_batch_size: !!python/name:os.system", "python/name"),
        ("rollout_batch_size: [1", "not valid YAML"),
        ("a: 1\n b: 2", "not valid YAML"),
        ("", "expected a mapping of settings, got NoneType"),
        ("- 1", "expected a mapping of settings, got list"),
    ],
)
def test_yaml_that_is_refused(text: str, words: str, tmp_path: Path) -> None:
    """YAML tags that would run code are refused like any other broken file, in one sentence that names the file."""
    path = tmp_path / "evil.yaml"
    path.write_text(text, "utf-8")
    with pytest.raises(ConfigError) as caught:
        Config.from_yaml(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A path that is not there, a directory, and bytes that are no text."""
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.yaml: No such file"):
        Config.from_yaml(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="cannot read"):
        Config.from_yaml(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(ConfigError, match=r"bytes\.yaml is not valid YAML"):
        Config.from_yaml(tmp_path / "bytes.yaml")


def test_yaml_without_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The sentence says what to install."""
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=r"needs PyYAML: pip install '.+\[yaml\]'"):
        Config.from_yaml(tmp_path / "any.yaml")


# ---------------------------------------------------------------- limits

SIMULATED: dict[str, Any] = {"rollout_batch_size": 2, "max_response_len": 50, "engine": {"kind": "simulated"}}
LARGEST_SEED = 2**63 - 1


def counts_and_waits() -> list[tuple[str, str]]:
    """Each whole number and each number of seconds, those of the engines left out: (path, kind)."""
    found: list[tuple[str, str]] = []
    for setting in settings_of():
        name, kind = setting.path.rpartition(".")[2], str(setting.annotation)
        if not setting.path.startswith("engine."):
            if name.endswith("_s"):
                found.append((setting.path, "seconds"))
            elif "int" in kind:
                found.append((setting.path, "count"))
    assert len({kind for _, kind in found}) == 2
    return found


def with_value(path: str, value: Any) -> dict[str, Any]:
    parent, _, name = path.rpartition(".")
    if name == "stop_token_ids":
        value = [value]
    return {**SIMULATED, parent: {name: value}} if parent else {**SIMULATED, name: value}


@pytest.mark.parametrize(("path", "kind"), counts_and_waits(), ids=lambda p: str(p))
def test_too_much_is_refused_by_name(path: str, kind: str) -> None:
    """Whatever is counted has a limit, and so has every wait; numbers that Python refuses to print have it too."""
    most = LARGEST_SEED if path == "seed" else MOST
    values = [LONGEST_S * 2, 1e300] if kind == "seconds" else [most + 1, 2**64, 10**5000]
    for value in values:
        with pytest.raises(ConfigError, match=path) as refused:
            Config(**with_value(path, value))
        assert len(str(refused.value)) < 300


def test_aborts_are_not_asked_for_without_end() -> None:
    """A thousandth of the longest wait is fine; what would be asked more than a million times is not."""
    Config(**SIMULATED, abort_deadline_s=30, abort_resend_s=0.001)
    for resend_s in (1e-9, 1e-300):
        with pytest.raises(ConfigError, match="would ask"):
            Config(**SIMULATED, abort_deadline_s=LONGEST_S, abort_resend_s=resend_s)


@pytest.mark.parametrize("changes", [{"abort_deadline_s": LONGEST_S, "abort_resend_s": LONGEST_S / 1e6}, {
    "outage_deadline_s": LONGEST_S, "function_timeout_s": LONGEST_S, "stall_timeout_s": LONGEST_S}])  # fmt: skip
def test_the_longest_waits_can_be_waited_for(changes: dict[str, float]) -> None:
    """They fit the clocks of the loop and of threads."""
    config = Config(rollout_batch_size=3, n_samples_per_prompt=2, max_response_len=100, **changes)
    with scheduler(config=config, reward=lambda prompt, response: float(len(response.tokens))) as rollouts:
        rollouts.next_batch()
        rollouts.weight_update()


def test_the_largest_numbers_go_into_a_checkpoint() -> None:
    """In msgpack too, in which adapters write it."""
    largest = {"seed": LARGEST_SEED, "max_in_flight": MOST, "max_staleness": MOST, "max_resumes": MOST}
    config = Config(rollout_batch_size=3, n_samples_per_prompt=2, max_response_len=100, **largest)
    with scheduler(config=config) as rollouts:
        rollouts.next_batch()
        rollouts.weight_update()
        msgspec.msgpack.encode(rollouts.state_dict())


@pytest.mark.parametrize("name", ["n_samples", "max_tokens"])
def test_evaluations_have_limits(name: str) -> None:
    with scheduler() as rollouts, pytest.raises(ConfigError, match=f"evaluate: {name} must be at most 2,147,483,647"):
        rollouts.evaluate([[1]], **{name: 10**5000})


# ---------------------------------------------------------------- engines


def no_loop(coroutine: Any) -> Any:
    """Engines in this process need no event loop to be made."""
    raise AssertionError("asked for a loop")


def test_simulated_engines_from_the_configuration() -> None:
    """As many as asked for, with names of their own and the numbers of the configuration; no model object."""
    config = SimulatedEngineConfig(count=3, slots=5, vocab_size=50, max_len=900)
    engines = create_engines(config, None, 1, no_loop)
    assert [e.name for e in engines] == ["simulated0", "simulated1", "simulated2"]
    assert all(isinstance(e, SimulatedEngine) for e in engines)
    c = engines[0].capabilities
    assert (c.max_in_flight, c.vocab_size, c.max_context) == (5, 50, 900)
    with pytest.raises(ConfigError, match="takes no model object"):
        create_engines(config, object(), 1, no_loop)


def test_the_embedded_engine_needs_a_model() -> None:
    """Neither a model object nor a directory: the sentence says where to put it."""
    with pytest.raises(ConfigError, match=r"model=\.\.\., or set engine.model"):
        create_engines(TransformersEngineConfig(), None, 0, no_loop)


# ---------------------------------------------------------------- import april

NOT_LOADED = ("torch", "numpy", "transformers", "aiohttp", "pydantic", "yaml", "omegaconf", "msgspec", "rich", "typer")


def test_import_april_loads_nothing_heavy() -> None:
    """`import april` in a fresh interpreter: no torch, numpy, transformers, aiohttp or any other package."""
    code = f"import sys, april; print([m for m in {NOT_LOADED!r} if m in sys.modules], len(april.__all__))"
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split(" ") == ["[]", f"{len(april.__all__)}\n"]


def test_the_configuration_and_the_core_need_no_engine_package() -> None:
    """april.Config and april.RolloutScheduler load neither torch nor transformers nor aiohttp."""
    code = (
        "import sys, april; april.Config; april.RolloutScheduler;"
        "print([m for m in ('torch', 'transformers', 'aiohttp', 'omegaconf', 'yaml') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_every_public_name_is_there() -> None:
    """All of __all__ can be fetched, dir() shows it, and an unknown name is an AttributeError."""
    for name in april.__all__:
        assert getattr(april, name).__name__ == name
    assert set(april.__all__) <= set(dir(april))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        april.Nothing  # noqa: B018
