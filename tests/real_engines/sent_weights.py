"""Weights sent to real vLLM servers, and what goes wrong in each phase of it, on a machine without a GPU.

``python -m tests.real_engines.sent_weights`` starts two servers and goes through servers that are killed, hung, slow,
or answer with an error or with words of failure, in each phase, with another server beside them and alone; and through
a trainer that is killed in the middle. After every update each token is compared with a model of the version that it
has, kept here, and the next update must reach all servers.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM

import april
from april.core.batch import Batch
from april.core.versions import PolicyVersion
from april.weights.source import WeightSource
from tests.real_engines.commands import vllm_server
from tests.real_engines.environments import ROOT
from tests.real_engines.fault_proxy import Fault, FaultProxy, Plan
from tests.real_engines.models import make_models
from tests.real_engines.servers import NotKept, Server, end, program, ready, until_ready
from tests.real_engines.weight_routes import change, logprobs

LIMIT_S = 5.0
"""outage_deadline_s: for each call of a server."""
PATIENCE_S = 3 * LIMIT_S + 5.0
"""A round that breaks may take the limit twice, the next one little."""
BACK_S = 20.0
"""Until a server that was away has answered a probe, and gets requests."""
CLOSE = 1e-3
"""Most nats between the server's log-probability of a token and that of the model of its version."""
APART = 0.1
"""Fewest nats by which two versions differ somewhere, so that a wrong one is seen."""
PHASES = {
    "join": ("/init_weight_transfer_engine", 0, "to connect to the sender"),
    "begin": ("/start_weight_update", 0, "to prepare"),
    "bucket": ("/update_weights", 1, "to take tensor"),
    "finish": ("/finish_weight_update", 0, "to put the weights into use"),
    "cache": ("/reset_prefix_cache", 0, "reset_prefix_cache|cache|update_weights"),
    "label": ("/update_weight_version", 0, "update_weight_version|update_weights"),
}
"""Route, calls before the one that goes wrong, and what the sentence says of it (a regular expression)."""
WRITES = ("bucket", "finish", "cache", "label")
BUCKET_BYTES = 1 << 19


@dataclass
class Trainer:
    """A model that is updated, and copies of it as it was in each version."""

    model: Any
    versions: dict[PolicyVersion, Any] = field(default_factory=dict)
    keeps: int = 4

    def now_is(self, version: PolicyVersion) -> None:
        """Keep a copy for what is generated under this version."""
        others = [(v, model) for v, model in self.versions.items() if v != version]  # another run may have had it, too
        self.versions = {version: copy.deepcopy(self.model), **dict(others[: self.keeps - 1])}

    def check(self, batch: Batch) -> set[str]:
        """Compare every token with its version's model; returns the engines that made them.

        Raises NotKept for a token that is of other weights.
        """
        engines, apart = set(), 0.0
        for sample in batch.samples:
            ids = [*sample.prompt.token_ids, *sample.tokens.tolist()]
            first = len(ids) - len(sample.tokens)
            scored = {v: logprobs(model, ids)[first - 1 :] for v, model in self.versions.items()}
            for segment in sample.segments:
                part = slice(segment.start, segment.start + segment.count)
                if segment.version not in scored:
                    raise NotKept(f"a token has version {segment.version}, which the trainer never had")
                said = torch.from_numpy(sample.logprobs[part].copy())
                worst = (said - scored[segment.version][part]).abs().max().item()
                if worst > CLOSE:
                    raise NotKept(f"{segment.engine} made tokens as {segment.version} that are {worst:.3g} nats off it")
                others = [s for v, s in scored.items() if v != segment.version]
                apart = max([apart, *((said - other[part]).abs().max().item() for other in others)])
                engines.add(segment.engine)
        if len(self.versions) > 1 and apart < APART:
            raise NotKept(f"two versions differ by {apart:.3g} nats only: this check sees nothing")
        return engines


class Heard(logging.Handler):
    """What april says in its log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def proxies_before(servers: Sequence[Server]) -> Iterator[list[FaultProxy]]:
    """Proxies on a loop of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    made = [FaultProxy(server.url) for server in servers]
    try:
        for proxy in made:
            asyncio.run_coroutine_threadsafe(proxy.start(), loop).result()
        yield made
    finally:
        for proxy in made:
            asyncio.run_coroutine_threadsafe(proxy.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def sent(model: Any) -> WeightSource:
    return WeightSource(model, bucket_bytes=BUCKET_BYTES)


def rollouts_on(urls: Sequence[str]) -> april.RolloutScheduler:
    """A scheduler before these servers."""
    config = april.Config(
        rollout_batch_size=4, n_samples_per_prompt=2, max_response_len=24, max_staleness=0, outage_deadline_s=LIMIT_S,
        abort_deadline_s=LIMIT_S, abort_resend_s=1.0, engine={"kind": "vllm", "urls": list(urls)},
        on_data_end="wrap",
    )  # fmt: skip
    prompts = [[3 + i, 20, 30, 40 + i] for i in range(64)]
    return april.RolloutScheduler(config, prompts=prompts, reward=None, progress=False)


class Matrix:
    """The cases, one after the other."""

    def __init__(self, servers: Sequence[Server], proxies: Sequence[FaultProxy], model: Path) -> None:
        self._servers, self._proxies = servers, proxies
        self._model = model
        started: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._trainer = Trainer(started.eval())
        self._seed = 0
        self._heard = Heard()
        logging.getLogger("april").addHandler(self._heard)
        self.wrong: list[str] = []

    def run(self, count: int, only: str) -> None:
        """All cases with this many servers, the first of which fails."""
        with rollouts_on([p.url for p in self._proxies[:count]]) as rollouts:
            self._good(rollouts, count)
            for phase in PHASES:
                for fault in Fault:
                    name = f"{count} servers, {phase}, {fault}"
                    if re.search(only, name):
                        self._told(name, partial(self._case, rollouts, count, phase, fault))

    def _told(self, name: str, case: Any) -> None:
        began = time.monotonic()
        try:
            told = case()
        except (NotKept, april.AprilError) as error:
            told = f"BROKEN: {type(error).__name__}: {error}"
            self.wrong.append(f"{name}: {told}")
        print(f"  {name} [{time.monotonic() - began:.1f} s]: {told}", flush=True)

    def _update(self, rollouts: april.RolloutScheduler) -> float:
        """Change the weights and send them; returns the seconds."""
        self._seed += 1
        change(self._trainer.model, self._seed, 0.05)
        self._heard.said.clear()
        began = time.monotonic()
        try:
            self._trainer.now_is(rollouts.weight_update(weights=sent(self._trainer.model)))
        finally:
            took = time.monotonic() - began
            if took > PATIENCE_S:
                raise NotKept(f"the update took {took:.1f} s")
        return took

    def _good(self, rollouts: april.RolloutScheduler, count: int) -> None:
        """An update that must reach all servers, seen by tokens of each."""
        self._update(rollouts)
        if left_out := [line for line in self._heard.said if "left out" in line]:
            raise NotKept(f"nothing was wrong, and {left_out[0]}")
        engines: set[str] = set()
        began = time.monotonic()
        while time.monotonic() - began < BACK_S:
            engines |= self._generated(rollouts)
            if len(engines) == count:
                return
        raise NotKept(f"after an update in which nothing was wrong only {sorted(engines)} made tokens")

    def _generated(self, rollouts: april.RolloutScheduler) -> set[str]:
        """The engines of a batch, all of whose tokens are right."""
        batch = rollouts.next_batch()
        rollouts.commit(batch.id)
        return self._trainer.check(batch)

    def _case(self, rollouts: april.RolloutScheduler, count: int, phase: str, fault: Fault) -> str:
        route, skip, words = PHASES[phase]
        server, proxy = self._servers[0], self._proxies[0]
        acts: dict[Fault, Callable[[], None]] = {
            Fault.KILLED: server.kill, Fault.STOPPED: partial(os.killpg, server.group, signal.SIGSTOP),
        }  # fmt: skip
        before = rollouts.version
        # a cache that is not empty yet is asked for again
        lasts = phase == "cache" and fault is Fault.SAYS_FAILED
        proxy.plan, proxy.carried_out = Plan(route, fault, skip, lasts, acts.get(fault, lambda: None)), False
        error: april.AprilError | None = None
        took = time.monotonic()
        try:
            try:
                self._update(rollouts)
            except april.EngineError as raised:
                error = raised
            took = time.monotonic() - took
            if not proxy.carried_out:
                raise NotKept(f"{route} was not called")
            told = str(error) if error is not None else " ".join(self._heard.said)
            if fault is Fault.SLOW:
                if error is not None or "left out" in told:
                    raise NotKept(f"a slow server is enough to break an update: {told}")
            else:
                self._require_sentence(told, proxy, words)
            if count > 1 and error is not None:
                raise NotKept(f"the other server was there, and the update failed: {error}")
            if error is not None and rollouts.version != before:
                raise NotKept(f"the update failed, and the version is {rollouts.version}")
            if error is None or (phase not in WRITES and fault in (Fault.ERROR, Fault.SAYS_FAILED)):
                self._generated(rollouts)  # on the other server, or under the weights of before
        finally:
            proxy.plan = None
            if fault is Fault.STOPPED:
                os.killpg(server.group, signal.SIGCONT)
            if fault is Fault.KILLED:
                server.kill()
                server.start()
                until_ready([server])
        self._good(rollouts, count)
        return f"{took:.1f} s; {told[:300]}"

    def _require_sentence(self, told: str, proxy: FaultProxy, words: str) -> None:
        if proxy.url.removeprefix("http://") not in told:
            raise NotKept(f"the server is not named: {told!r}")
        if not re.search(words, told):
            raise NotKept(f"the phase is not named: {told!r}")

    def killed_trainer(self) -> str:
        """A trainer that dies in the middle of a transfer; the next one needs no restart of the servers."""
        command = [sys.executable, "-m", __spec__.name, "--trainer", str(self._model), *(p.url for p in self._proxies)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
            killed = threading.Event()

            def kill() -> None:
                process.kill()
                killed.set()

            self._proxies[0].plan = Plan("/update_weights", Fault.SLOW, 2, act=kill)
            process.wait(60)
            if not killed.is_set():
                raise NotKept("the trainer has ended by itself")
        began = time.monotonic()
        with rollouts_on([p.url for p in self._proxies]) as rollouts:
            self._good(rollouts, len(self._proxies))
        return f"the next trainer's first update and tokens after {time.monotonic() - began:.1f} s"


def trainer(model: str, urls: Sequence[str]) -> None:
    """Send weights until killed."""
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with rollouts_on(urls) as rollouts:
        while True:
            rollouts.weight_update(weights=sent(whole))


def main(only: Annotated[str, typer.Argument(help="Cases whose names have it, a regular expression.")] = "") -> None:
    """All cases with two servers and with one, and a trainer that is killed."""
    with program(), tempfile.TemporaryDirectory() as folder:
        model = make_models(Path(folder))["first"]
        servers = [vllm_server(f"vllm-{i}", model, Path(folder), open_routes=True, context=512) for i in range(2)]
        with ready(*servers), proxies_before(servers) as proxies:
            matrix = Matrix(servers, proxies, model)
            for count in (2, 1):
                matrix.run(count, only)
            if re.search(only, "killed trainer"):
                matrix._told("killed trainer", matrix.killed_trainer)
    end(matrix.wrong)


if __name__ == "__main__":
    if "--trainer" in sys.argv:
        trainer(sys.argv[2], sys.argv[3:])
    else:
        typer.run(main)
