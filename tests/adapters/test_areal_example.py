"""examples/areal: AReaL's script, of which april is the import line."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

from adapters import stand_in_areal as areal
from april.adapters.areal.settings import config_of

HERE = Path(__file__).parent.parent.parent / "examples" / "areal"


def script() -> Any:
    spec = importlib.util.spec_from_file_location("areal_train", HERE / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_april_accepts_the_configuration(tmp_path: Path) -> None:
    """The paper's workload, split over four ranks that train."""
    config = areal.config(tmp_path)
    for part, values in yaml.safe_load((HERE / "grpo.yaml").read_text("utf-8")).items():
        if part in ("gconfig", "rollout", "actor"):
            vars(getattr(config, part)).update(values)
    april = config_of(config, {}, groups=8, ranks=4)
    assert (april.generation, april.n_samples_per_prompt, april.max_staleness) == ("continuous", 8, 2)
    assert april.max_in_flight == 64


def test_a_wrong_choice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before AReaL is imported."""
    monkeypatch.setenv("ROLLOUT", "plain")
    with pytest.raises(SystemExit, match="ROLLOUT=plain must be one of april, own"):
        script().main([])
