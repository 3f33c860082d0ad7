"""What a server costs, measured by requests: found as it is, written, and planned with."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from fake_servers.vllm import FakeVllmServer
from records import command
from server_fixtures import ServerThread

from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.engine import SimulatedEngine
from april.simulate import plan as planning
from april.simulate.profile import ROUNDS, CostProfile, in_flight_points, profile, read_cost
from april.testing import run_virtual

COST = DecodeCost(8e-3, 1.2e-4, 2e-7, 3e-5)


def measured(engine: Any, **options: Any) -> CostProfile:
    async def program() -> CostProfile:
        try:
            values = {"most": 48, "tokens": 200} | options
            return await profile(engine, now=asyncio.get_running_loop().time, **values)
        finally:
            await engine.close()

    return run_virtual(program())


def test_the_cost_is_found() -> None:
    """A step with few sequences and with many, short and long ones, within 8 %; progress is told up to the end."""
    told: list[tuple[int, int]] = []
    engine = SimulatedEngine("e", COST, lambda r: 10_000, max_running=64)
    found = measured(engine, progress=lambda done, total: told.append((done, total)))
    for sequences, resident in ((1, 300), (8, 3_000), (48, 20_000)):
        assert found.cost.step_s(sequences, resident) == pytest.approx(COST.step_s(sequences, resident), rel=0.08)
    assert found.cost.per_prefill_token_s == pytest.approx(COST.per_prefill_token_s, rel=0.15)
    assert found.held_out < 0.03
    assert told[-1] == (ROUNDS * 7, ROUNDS * 7)
    assert found.requests == (ROUNDS - 2) * sum(in_flight_points(48))
    assert list(found.speeds) == in_flight_points(48)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """The very numbers; anything else is refused in a sentence."""
    path = tmp_path / "below" / "profile.json"
    CostProfile(cost=COST, requests=90, held_out=0.01, speeds={1: 90.0}).write(path)
    assert read_cost(path) == COST
    for text, sentence in (
        ("{}", "missing required field `cost`"), ("[]", "Expected `object`"), ("{", "was not written by april profile"),
        ("[" * 100_000, "was not written by april profile"), ('{"cost": {"speed": 3}}', "`base_s`"),
        ('{"cost": {"base_s": -1, "per_sequence_s": 0, "per_kv_token_s": 0}}', "must be finite"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=sentence):
            read_cost(path)
    with pytest.raises(ValueError, match="cannot read"):
        read_cost(tmp_path / "nothing")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From an address to a plan, whose simulations are short."""
    monkeypatch.setattr(planning, "ENOUGH_RESPONSES", 1)
    monkeypatch.setattr(planning, "ROUNDS", 0)
    out = tmp_path / "profile.json"
    server = FakeVllmServer()
    with ServerThread(server):
        arguments = [server.url, "--kind", "vllm", "--max-in-flight", "8", "--tokens", "16", "--out", out]
        code, said = command("profile", *arguments)
    assert code == 0, said
    assert re.search(r"for each 1,000 tokens .* memory; a prefilled token takes [\d.]+ .?s\. ", said)
    assert read_cost(out).base_s > 0.0
    assert set(json.loads(out.read_text())["speeds"]) == {"1", "2", "4", "8"}
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text("\n".join(f'{{"lengths": [{10 + i}, {20 + i}, {40 + i}, {90 + 7 * i}]}}' for i in range(16)))
    small = ["--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--engines", "1"]
    plan = ["plan", lengths, "--cost", out, *small, "--max-response-len", "300"]
    code, said = command(*plan, "--out", tmp_path / "plan")
    assert code == 0, said
    code, said = command(*plan, "--gpu", "h100")
    assert (code, "the engines' cost was measured; leave out gpu" in said) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["http://127.0.0.1:9", "--kind", "vllm"], 1, "127.0.0.1:9"),
        (["http://127.0.0.1:9", "--kind", "vlm"], 2, "april has no engine 'vlm'"),
        (["http://127.0.0.1:9", "--kind", "vllm", "--api-key-env", "NO_SUCH_KEY"], 2, "NO_SUCH_KEY is not set"),
        (["127.0.0.1", "--kind", "vllm"], 2, "http://"),
        (["http://127.0.0.1:9", "--kind", "vllm", "--out", "."], 2, "cannot write .: Is a directory"),
    ],
)
def test_what_is_wrong_is_said(
    arguments: list[str], code: int, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is measured; and no file is left."""
    monkeypatch.chdir(tmp_path)
    found, said = command("profile", *arguments)
    assert (found, sentence in said) == (code, True), said
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
