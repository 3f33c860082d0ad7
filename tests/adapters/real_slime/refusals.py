"""Wrong use, said in one sentence each by the adapter inside the real slime, with flags of slime's own parser."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from april.adapters.slime import make_generate_rollout
from april.errors import AprilError
from benchmarks.slime_rollouts import served
from benchmarks.slime_surroundings import Trainer, write_inputs

ROOT = Path(__file__).resolve().parents[3]
OVER = ["--rollout-batch-size", "4", "--over-sampling-batch-size", "8", "--n-samples-per-prompt", "2"]


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    with served(["--shorter", "100", "--faster", "20"]) as url:
        yield url, write_inputs(tmp_path_factory.mktemp("inputs"))


def ask(surroundings: tuple[str, Path], *flags: str, **settings: Any) -> Any:
    trainer = Trainer("slime")
    args = trainer.arguments(*surroundings, [*OVER, *flags])
    for name, value in settings.items():
        setattr(args, name, value)
    function = make_generate_rollout(check=True)
    try:
        return function(args, 0, trainer.data_source(args))
    finally:
        function.close()


@pytest.mark.parametrize(("flags", "settings", "said"), [
    ([], {}, "it starts more groups than --rollout-batch-size 4, and without --partial-rollout the tokens of"),
    (["--partial-rollout", "--rollout-top-p", "0.9"], {}, (
        "--rollout-top-p 0.9: the trainer would recompute log-probabilities"
    )),
    (["--partial-rollout", "--rollout-top-k", "20"], {}, (
        "--rollout-top-k 20: the trainer would recompute log-probabilities"
    )),
    (["--partial-rollout", "--disable-rollout-global-dataset"], {}, "it leaves april without prompts"),
    (["--partial-rollout", "--custom-rm-path", "nowhere.reward"], {}, "slime cannot load nowhere.reward"),
    (
        ["--partial-rollout", "--n-samples-per-prompt", "4"], {"april": {"group_quorum": 0.75}},
        "april.group_quorum=0.75: it delivers groups in parts, but slime takes the mean reward over whole ones; add "
        "--custom-reward-post-process-path april.adapters.slime.post_process_rewards",
    ),
    (
        ["--partial-rollout", "--n-samples-per-prompt", "4", "--group-rm"], {"april": {"group_quorum": 0.75}},
        "--group-rm: it needs whole groups, but april.group_quorum=0.75 delivers parts of them",
    ),
    (
        ["--partial-rollout", "--n-samples-per-prompt", "4", "--log-passrate"], {"april": {"group_quorum": 0.75}},
        "--log-passrate: it needs whole groups, but april.group_quorum=0.75 delivers parts of them",
    ),
    (
        ["--partial-rollout"], {"april": {"on_failed_sample": "shrink"}},
        "april.on_failed_sample=shrink: a batch would have fewer than --rollout-batch-size * --n-samples-per-prompt",
    ),
    (["--partial-rollout"], {"april": {"sampling": {"top_p": 0.9}}}, "april.sampling: slime's --rollout-temperature"),
    (["--partial-rollout"], {"april": {"engine": {"urls": []}}}, "engine.urls"),
])  # fmt: skip
def test_flags_that_cannot_be_right(
    flags: list[str], settings: dict[str, Any], said: str, surroundings: tuple[str, Path]
) -> None:
    """Each before anything is generated, with the flag and what to do."""
    with pytest.raises(AprilError, match=re.escape(said)) as error:
        ask(surroundings, *flags, **settings)
    print(error.value)
    assert "\n" not in str(error.value)


def test_correction_that_is_off(surroundings: tuple[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    """Tokens of older weights without --use-tis: it runs, and one sentence says what that means."""
    with caplog.at_level(logging.WARNING, "april"):
        ask(surroundings, "--partial-rollout", use_tis=False)
    assert "add --use-tis or --use-rollout-logprobs" in caplog.text


def test_a_slime_in_which_something_has_moved(
    surroundings: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found at the start, and named."""
    import slime.rollout.rm_hub

    monkeypatch.delattr(slime.rollout.rm_hub, "async_rm")
    with pytest.raises(AprilError, match=r"slime has no rollout.rm_hub.async_rm.* tried with slime 624b824"):
        ask(surroundings, "--partial-rollout")


def test_without_slime() -> None:
    """The adapter can be imported, and says what it is for when it is called."""
    code = "import april.adapters.slime as a; a.generate_rollout(None, 0, object())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert "is called by slime or miles" in done.stderr.splitlines()[-1]
