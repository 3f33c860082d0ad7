"""The study on GPUs runs whole, on a tiny model and a CPU: the same script, and tables that fill themselves."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import april
from benchmarks.gpu_study import __main__ as program
from benchmarks.gpu_study import design, plan, questions, smoke, training
from benchmarks.gpu_study.__main__ import main
from benchmarks.gpu_study.questions import is_right
from benchmarks.study.claims import OPEN
from benchmarks.study.runner import Cost, outcome_path

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A design in small: one GPU that is a CPU, two ranks, and a server."""
    return smoke.write(tmp_path_factory.mktemp("tiny"), "cpu")


def in_this_process(out: Path, name: str, settings: Any, *, design: Any, **_: Any) -> Cost:
    """As `launch`, without another process."""
    training.train(out, name, settings, design.tasks[settings.task], [], lambda line: print(line))
    return Cost(name, 0.0, 0.0)


def test_the_study_runs_and_fills_its_tables(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All arms by the command of the page; what is there is not run again; before it ran, nothing is claimed."""
    words = ["--gpus", "1", "--design", str(tiny), "--out", str(tmp_path)]
    monkeypatch.setattr(plan, "STEPS", 4)
    monkeypatch.setattr(plan, "RAMP", 1)
    assert main(["page", *words]) == 0
    before = (tmp_path / "page-1.md").read_text("utf-8")
    assert "0 of 4 trainings have run." in before
    assert "not measured" in before
    assert "Measured" not in before
    assert f"* {OPEN}: " in before

    monkeypatch.setattr(program, "launch", in_this_process)
    assert main(["run", *words]) == 0
    text = (tmp_path / "page-1.md").read_text("utf-8")
    assert "4 of 4 trainings have run (CPU)." in text
    rows = [line.split("|") for line in text.partition("## Measured")[2].splitlines() if line.startswith("|")]
    found = {row[1]: row[2:-1] for row in rows}
    assert {"tiny, sync", "tiny, over-2", "tiny, refill", "tiny, quorum-0.5"} <= found.keys()
    assert found["tiny, sync"][2:4] == ["", ""]
    assert found["tiny, over-2"][2]
    assert found["tiny, sync"][-1] == "0%"
    assert found["tiny, refill"][-1] != "0%"
    assert (tmp_path / "study-1.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    figures = json.loads((tmp_path / "figures-1.json").read_text("utf-8"))
    assert figures["trainings"] == 4
    for name, settings in design.read(tiny).of(1).items():
        outcome = msgspec.json.decode(outcome_path(tmp_path, name).read_bytes(), type=training.GpuOutcome)
        assert outcome.settings == settings
        assert [e.step for e in outcome.evaluations] == [0, 2, 4]
        assert outcome.evaluations[-1].decode_steps > outcome.evaluations[1].decode_steps > 0
        last = outcome.evaluations[-1]
        assert last.wall_s == pytest.approx(last.rollout_s + last.train_s + last.update_s, abs=0.03)
        assert last.gpu_s == last.wall_s
    assert not list((tmp_path / "checkpoints").glob("*.pt"))

    monkeypatch.setattr(program, "launch", lambda *_, **__: pytest.fail("nothing is left to run"))
    assert main(["run", *words]) == 0
    assert main(["status", *words]) == 0
    assert "4 of 4 trainings" in capsys.readouterr().out.splitlines()[-1]


def test_a_training_goes_on_from_its_checkpoint(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stop after step 3 costs the one since the checkpoint; weights, moments, questions and seconds go on."""
    made = design.read(tiny)
    name = "tiny/over-2/7"
    settings, sizes = made.of(1)[name], made.tasks["tiny"]
    step = training._Training._step
    rows: list[int] = []

    def stops(self: Any) -> None:
        if self._notes.step == 3:
            raise KeyboardInterrupt
        step(self)
        rows.append(self._notes.step)

    with monkeypatch.context() as patch:
        patch.setattr(training._Training, "_step", stops)
        with pytest.raises(KeyboardInterrupt):
            training.train(tmp_path, name, settings, sizes, [])
    assert main(["status", "--gpus", "1", "--design", str(tiny), "--out", str(tmp_path)]) == 0
    assert f"{name}: 2 of 4 steps" in capsys.readouterr().out
    saved = torch.load(training.checkpoint_path(tmp_path, name), weights_only=True)
    assert saved["rollouts"]
    training.train(tmp_path, name, settings, sizes, [])
    outcome = msgspec.json.decode(outcome_path(tmp_path, name).read_bytes(), type=training.GpuOutcome)
    assert [e.step for e in outcome.evaluations] == [0, 2, 4]
    assert len(outcome.kl_k3) == 4
    assert "goes on after step 2" in capsys.readouterr().out


def test_ranks_train_in_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks under torchrun, with FSDP2 and recomputation, by the command that downloads nothing."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert main(["smoke", "--device", "cpu", "--gpus", "2", "--out", str(tmp_path)]) == 0
    path = outcome_path(tmp_path / "smoke", "ranks/over-2/7")
    outcome = msgspec.json.decode(path.read_bytes(), type=training.GpuOutcome)
    last = outcome.evaluations[-1]
    assert last.gpu_s == pytest.approx(2 * last.wall_s, abs=0.02)


def test_micro_batches_and_recomputation_change_no_update(tiny: Path, tmp_path: Path) -> None:
    """A few rows at a time, in any number, give the gradients of all at once."""
    made = design.read(tiny)
    settings, sizes = msgspec.structs.replace(made.of(1)["tiny/sync/7"], steps=1), made.tasks["tiny"]
    saved = []
    for number, changed in enumerate(({}, {"tokens_at_once": 10_000}, {"tokens_at_once": 1, "recompute": True})):
        out, found = tmp_path / str(number), msgspec.structs.replace(sizes, **changed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training, "reward", by_length)
            patch.setattr(training._Training, "_save", lambda self: saved.append(weights_of(self)))
            training.train(out, "tiny/sync/7", settings, found, [])
    first, *others = saved
    start = AutoModelForCausalLM.from_pretrained(sizes.model).state_dict()
    assert max(float((first[name] - start[name]).abs().max()) for name in first) > 1e-4
    for other in others:
        for name, value in first.items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=2e-5)


def by_length(prompt: april.Prompt, response: april.Response) -> float:
    """A reward that differs within every group."""
    return len(response.tokens) / 24


def weights_of(run: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run._model.state_dict().items()}


# ---------------------------------------------------------------- servers and answers


@pytest.mark.parametrize(("text", "answer", "right"), [
    (r"so \boxed{18}", "18", True),
    (r"\boxed{3} no, \boxed{\frac{1}{2}}", "1/2", True),
    (r"\boxed{\dfrac{1}{2}}", "0.5", True),
    (r"\boxed{7} or 18", "18", False),
    (r"\boxed{7", "18", False),
    ("The answer is 1,234.", "1234", True),
    ("Answer: 34", "34", True),
    ("3 + 4 = 7", "7", True),
    ("It is 3.0", "3", True),
    ("minus -5", "5", False),
    ("nothing", "0", False),
    (r"\boxed{x+1}", "x + 1", True),
    (r"\boxed{1/0}", "1", False),
])  # fmt: skip
def test_the_verifier_takes_the_box_or_the_last_number(text: str, answer: str, right: bool) -> None:
    """Equal as text or as a number; a box goes before whatever follows it."""
    assert is_right(text, answer) is right


def test_questions_are_asked_once_and_held_out_ones_never(tiny: Path) -> None:
    """No question twice, none of the held-out ones; every arm of a seed has the same order, every pass another one."""
    sizes = design.read(tiny).tasks["tiny"]
    tokenizer = AutoTokenizer.from_pretrained(sizes.model)
    train, held_out = questions.split(sizes, tokenizer)
    ids = [tuple(prompt["token_ids"]) for prompt in train + held_out]
    assert len(ids) == len(set(ids)) == 13
    assert {"2", "4", "8"} <= {prompt["answer"] for prompt in train + held_out}
    first = list(itertools.islice(questions.stream(train, 3), 2 * len(train)))
    assert first == list(itertools.islice(questions.stream(train, 3), 2 * len(train)))
    assert first[: len(train)] != first[len(train) :]
    assert all(prompt in train for prompt in first)
    apart = msgspec.structs.replace(sizes, held_out=sizes.questions)
    train, held_out = questions.split(apart, tokenizer)
    assert not {tuple(p["token_ids"]) for p in train} & {tuple(p["token_ids"]) for p in held_out}
    with pytest.raises(ValueError, match=r"too few"):
        questions.split(msgspec.structs.replace(sizes, prompt_cap=3), tokenizer)
