"""The examples use what is public, and the loop of one's own is whole: it imports april and learns."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from models_that_see import EOS, VOCAB_SIZE, tiny_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

import april
from april.record.replay import replay
from april.view.off_policy_summary import off_policy_summary
from april.view.run_data import read_run

EXAMPLES = Path(__file__).parent.parent / "examples"
FILES = sorted(EXAMPLES.rglob("*.py"))
ADAPTERS = {f"april.adapters.{trainer}" for trainer in ("areal", "openrlhf", "slime", "trl", "verl")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_examples_import_from_april_only(path: Path) -> None:
    """What a reader copies comes from `april`, or from the adapter of a trainer."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
    ours = {name for name in modules if name.split(".")[0] == "april"}

    assert ours <= {"april"} | ADAPTERS


@pytest.fixture(autouse=True)
def beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a program that is run, examples import each other."""
    monkeypatch.syspath_prepend(EXAMPLES)


def loaded(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    example = sys.modules[name] = importlib.util.module_from_spec(spec)  # its dataclasses look there
    spec.loader.exec_module(example)
    return example


def reports_in(record: Path) -> int:
    """Number of batches of which a record says how far off they were, once per batch."""
    health = off_policy_summary(read_run(record))
    return 0 if health is None else health.batches


@pytest.mark.parametrize(("steps", "how"), [(10, []), (15, ["--group-quorum", "0.5"])], ids=["whole groups", "quorum"])
def test_the_loop_of_ones_own_learns(
    steps: int, how: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some steps of examples/own_loop.py on tokens of which most are from older weights: the reward rises.

    Its record says how far off each batch was.
    """
    example = loaded("own_loop")
    monkeypatch.chdir(tmp_path)  # it leaves a record of its run

    assert example.main(["--steps", str(steps), *how]) > 0.7
    assert replay(tmp_path / "runs" / "own_loop.jsonl").core.context.batches == steps
    assert reports_in(tmp_path / "runs" / "own_loop.jsonl") == steps
    assert (tmp_path / "runs").stat().st_mode & 0o777 == 0o700
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 0: reward 0.5")
    assert len([line for line in lines if line.startswith("step ")]) == steps


@pytest.mark.parametrize(
    "how", [{}, {"--task": "gcd", "--layers": 0}, {"--mode": "quorum"}], ids=["sums", "gcd", "quorum"]
)
def test_the_real_models_loop_trains_and_writes_its_figures(
    how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """examples/real_model.py on a tiny model: both tasks, stop strings, verified answers, held-out questions.

    Only the layers that it is told are trained.
    """
    example, out = loaded("real_model"), tmp_path / "figures" / "april.json"
    model, tokenizer = tiny_qwen3(), tiny_tokenizer()
    before = [p.detach().clone() for p in model.parameters()]
    monkeypatch.setattr(example, "load", lambda: (model, tokenizer))
    rewards = iter(range(10**6))
    monkeypatch.setattr(example, "reward", lambda prompt, response: float(next(rewards) % 3 == 0))
    asked = {"--steps": 3, "--every": 2, "--held-out": 2, "--longest": 12, "--out": out, **how}

    figures = example.main([str(part) for pair in asked.items() for part in pair])

    assert json.loads(out.read_text()) == figures
    assert [("held_out" in row, "reward" in row) for row in figures] == [
        (True, True), (False, True), (True, True), (False, False),
    ]  # fmt: skip
    changed = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
    in_layers = [name.startswith("model.layers.") for name, _ in model.named_parameters()]
    trained = {layer for layer, other in zip(in_layers, changed, strict=True) if other}
    assert trained == ({True, False} if how.get("--layers") == 0 else {True})
    task = next(iter(example.Questions(0)))
    right = SimpleNamespace(text=lambda: f"It is 3, or rather {task['answer']}.")
    wrong = SimpleNamespace(text=lambda: "I do not know")
    prompt = april.Prompt(np.array([1], np.int32), task)
    monkeypatch.undo()
    assert [loaded("real_model").reward(prompt, r) for r in (right, wrong)] == [1.0, 0.0]


def tiny_qwen3() -> Qwen3ForCausalLM:
    """For the vocabulary of `tiny_tokenizer`, with the same random weights every time."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=256, eos_token_id=EOS,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def test_the_real_models_trainer_moves_all_tensors_to_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """One update on a device that is not the CPU: tensors without values, which meet none of the CPU's."""
    example = loaded("real_model")
    arrays = dict.fromkeys(("input_ids", "attention_mask"), np.ones((2, 5), np.int32))
    arrays |= {"response_ids": np.ones((2, 3), np.int32), "loss_mask": np.ones((2, 3), np.uint8)}
    arrays["logprobs"] = np.full((2, 3), -1.0, np.float32)
    batch = MagicMock(spec=april.Batch)
    batch.padded.return_value, batch.advantages.return_value = arrays, np.array([1.0, -1.0], np.float32)
    batch.__len__.return_value, batch.lengths = 2, np.array([3, 3])
    model: Any = tiny_qwen3()
    model.to("meta")
    model.set_attn_implementation("eager")  # it asks no tensor for its values
    for check in ("importance.check_logprobs", "policy_loss.check_values"):
        monkeypatch.setattr(f"april.corrections.{check}", lambda *_: None)  # neither does that
    trainer, given = example.Trainer(model, 1e-3, rows=1), []
    model.register_forward_pre_hook(
        lambda _, ids, named: given.extend([*ids, named["attention_mask"]]), with_kwargs=True
    )

    trainer.update(batch)

    assert [tensor.device.type for tensor in given] == ["meta"] * 4
    assert {state["exp_avg"].device.type for state in trainer._optimizer.state.values()} == {"meta"}
    with pytest.raises(RuntimeError, match="device"):  # so it would be seen behind the model
        torch.zeros(1) * torch.zeros(1, device="meta")[None]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_real_models_engine_computes_as_the_trainer_does(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The autocast of --dtype holds for generation and loss, and no longer: the weights stay float32."""
    example, model, computed = loaded("real_model"), tiny_qwen3(), set()
    model.lm_head.register_forward_hook(lambda _, __, out: computed.add((out.dtype, torch.is_grad_enabled())))
    monkeypatch.setattr(example, "load", lambda: (model, tiny_tokenizer()))
    rewards = iter(range(10**6))
    monkeypatch.setattr(example, "reward", lambda prompt, response: float(next(rewards) % 3 == 0))

    example.main(["--steps", "1", "--held-out", "0", "--longest", "6", "--dtype", dtype])

    assert computed == {(getattr(torch, dtype), False), (getattr(torch, dtype), True)}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


def test_the_loop_of_ranks_runs_as_one_process(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Without torchrun, as docs/processes.md says; what it saved goes on."""
    example, saved = loaded("own_loop_ranks"), str(tmp_path / "saved.pt")

    example.main(["--steps", "1", "--checkpoint", saved])
    example.main(["--steps", "2", "--checkpoint", saved, "--resume"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 1"]
    assert all("64 responses on 1 ranks" in line for line in lines)


def test_the_loop_with_images_learns_what_it_sees(capsys: pytest.CaptureFixture[str]) -> None:
    """More than half of the tokens fit the colour, which only the image says, over updates and resumed responses."""
    pytest.importorskip("PIL")
    assert loaded("own_loop_images").main(["--steps", "14"]) > 0.65
    lines = capsys.readouterr().out.splitlines()
    assert any("0% from" not in line for line in lines)


@pytest.mark.usefixtures("client_left_open")
def test_the_agent_with_a_tool_trains(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A step of examples/tool_agent.py, from OpenAI's client to the optimizer, on a model that knows no calculator."""
    pytest.importorskip("openai")
    pytest.importorskip("renderers")
    from tests.real_engines.models import make_models

    example = loaded("tool_agent")
    model = make_models(tmp_path)["first"]

    assert example.main(["--model", str(model), "--steps", "2"]) == [0.0, 0.0]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["step", "0", "1"]
    del example.HTTP


def test_the_agent_has_its_reward_by_a_call_and_a_number() -> None:
    """Half for the call that was asked for, half for the right number at the end, and nothing for luck in a call."""
    pytest.importorskip("openai")
    example = loaded("tool_agent")

    def reward(called: str, said: str) -> float:
        prompt = april.Prompt(np.array([1], np.int32), {"expression": "12 - 30"})
        return float(example.reward(prompt, SimpleNamespace(output=example.Episode(called, said))))

    assert reward("12 - 30", "-18") == 1.0
    assert reward("12 - 30", "18") == reward("", "It is -18") == 0.5
    assert reward("12 - 3", "9") == reward("", "CALC(12 - 30)") == 0.0


def test_the_example_of_several_turns_prints_its_steps_and_one_story(capsys: pytest.CaptureFixture[str]) -> None:
    """Seven batches of 24 samples, later ones with resumed samples; a story over several versions with tool answers."""
    loaded("multi_turn_tool").main()

    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[1:8]]
    assert [row[:2] for row in rows] == [[str(n), "24"] for n in range(7)]
    assert rows[0][2] == "0"
    assert all(int(row[2]) > 0 for row in rows[1:])
    story = [line for line in lines[8:] if line.startswith("  ")]
    assert sum("calculator" in line for line in story) >= 2
    assert len({line.split()[3] for line in story if "policy" in line}) >= 3


class TeachersServer:
    """An OpenAI-compatible server with a model, which answers what examples/distillation.py asks of a teacher.

    As vLLM does, it returns the log-probability of each token of the prompt, null for the first one, and then those of
    the tokens that it generates, here always token 0.
    """

    def __init__(self, model: Any) -> None:
        self.asked: list[list[int]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({"data": [{"id": "teacher"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert (body["model"], body["echo"], body["max_tokens"]) == ("teacher", True, 1)
                teacher.asked.append(body["prompt"])
                scores = logprobs_of(model, body["prompt"]).tolist()
                self._answer({"choices": [{"logprobs": {"token_logprobs": [None, *scores, -0.5]}}]})

            def _answer(self, content: Any) -> None:
                data = json.dumps(content).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        teacher = self
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@torch.no_grad()
def logprobs_of(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Log-probability of each token but the first."""
    ids = torch.tensor(token_ids)
    scores: torch.Tensor = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return scores


@pytest.mark.filterwarnings("ignore:policy_loss. the weights of the responses")  # the machine decides how old they are
def test_distillation_brings_the_student_to_the_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    """examples/distillation.py on tiny models: the log-probabilities are the teacher's, and the divergence falls."""
    torch.manual_seed(1)
    example, student, teacher = loaded("distillation"), tiny_qwen3(), tiny_qwen3()
    with torch.no_grad():
        for weight in teacher.parameters():  # a random model is almost uniform
            weight.mul_(6.0)
    monkeypatch.setattr(example, "load", lambda: (student, tiny_tokenizer()))
    batches: list[april.Batch] = []
    update = example.Student.update
    monkeypatch.setattr(example.Student, "update", lambda self, batch: (batches.append(batch), update(self, batch)))
    served = TeachersServer(teacher)
    try:
        divergences = example.main([
            "--teacher", f"{served.url}/", "--steps", "10", "--responses", "16", "--longest", "8",
            "--learning-rate", "0.05",
        ])  # fmt: skip
    finally:
        served.server.shutdown()
        served.server.server_close()

    assert len(served.asked) >= 10 * 16
    for row in batches[-1].samples:
        assert row.row_reward is not None
        conversation = [*row.prompt.token_ids.tolist(), *row.tokens.tolist()]
        theirs = logprobs_of(teacher, conversation)[len(row.prompt.token_ids) - 1 :].numpy()
        np.testing.assert_allclose(row.row_reward.per_token["teacher_logprobs"], theirs, atol=1e-4)
        assert row.reward == pytest.approx(float((theirs - row.logprobs).mean()), abs=1e-4)
    assert np.mean(divergences[-3:]) < 0.8 * divergences[0]
