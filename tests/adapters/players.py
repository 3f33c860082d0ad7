"""One face for every adapter: a stand-in of its trainer trains on what april delivers, and ends without notice."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_servers.vllm import FakeVllmServer
from real_schedulers import LENGTHS, VOCAB, assert_nothing_is_left
from server_fixtures import KNOWN, ServerThread
from tiny_models import tiny_model

from adapters import openrlhf_stand_in as openrlhf
from adapters import slime_stand_in as slime
from adapters import stand_in_areal as areal
from adapters import stand_in_trl as trl
from adapters import stand_in_trl_async as trl_async
from adapters import stand_in_verl as verl
from april.adapters import trl as trl_adapter
from april.adapters.verl.rollouts import STATE_FILE
from april.engines.simulated.engine import synthetic_response

ROWS = 240
Judge = Callable[[int, int, int], float]
"""The reward of (row, number of its call, tokens if they are counted); what it raises, the reward function raises."""
QUORUM = {"group_quorum": 0.75}


@dataclass
class Response:
    """One response as its trainer was given it."""

    row: int
    sample: int
    tokens: list[int]
    versions: list[int]
    """The number of the weights of each token."""
    uncut: list[int] | None
    """The tokens that a server without cuts would have given; None where nobody knows."""
    advantage: float | None = None
    """Where april computes it."""


@dataclass
class Book:
    """A ledger of april's."""

    observed: int
    delivered: int
    held: int
    dropped: dict[str, int]

    @classmethod
    def of(cls, ledger: Any) -> Book:
        """Of the core's ledger, or its plain form."""
        get = ledger.get if isinstance(ledger, dict) else lambda name: getattr(ledger, name)
        dropped = {str(reason): count for reason, count in get("dropped").items() if count}
        return cls(get("observed"), get("delivered"), get("held"), dropped)


@dataclass
class Life:
    """One process of a training run."""

    batches: list[list[Response]]
    prompts: Book
    tokens: Book
    given: int
    """Prompts that the trainer's data have given, those before a restart included, less those not yet begun."""


class Player:
    """A trainer whose runs go on from what the last one has saved in ``folder``.

    Settings: ``own`` are april's; ``judge`` gives rewards; ``keeps`` is a filter of groups by their row.
    """

    groups, samples = 3, 2
    quorum_samples: int | None = 6
    """Samples per prompt with a quorum; None: this trainer has groups delivered whole."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.step = 0
        """Steps that are saved."""
        self.calls: Counter[int] = Counter()

    def judged(self, row: int, judge: Judge | None, length: int = 0) -> float:
        self.calls[row] += 1
        return 1.0 if judge is None else judge(row, self.calls[row], length)

    def live(
        self, saved: int, more: int = 0, *, own: dict[str, Any] | None = None, judge: Judge | None = None,
        keeps: Callable[[int], bool] | None = None,
    ) -> Life:  # fmt: skip
        """Train ``saved`` steps, each with its checkpoint, and ``more`` without, which are in vain."""
        own = own or {}
        self.n = self.quorum_samples or self.samples if "group_quorum" in own else self.samples
        try:
            life = self._live(saved, more, own, judge, keeps)
        finally:
            assert_nothing_is_left()
        self.step += saved
        return life

    def _live(self, saved: int, more: int, own: Any, judge: Any, keeps: Any) -> Life:
        raise NotImplementedError

    def state_file(self) -> Path:
        """april's part of the last checkpoint."""
        raise NotImplementedError


class Trl(Player):
    groups, quorum_samples = 2, 4

    def _live(self, saved: int, more: int, own: Any, judge: Any, keeps: Any) -> Life:
        if keeps is None and judge is not None and "group_quorum" not in own:
            keeps = lambda row: True  # else TRL alone asks for rewards  # noqa: E731
        rollouts = trl_adapter.rollout(
            trl.PARTIALS | {"over_sampling_batch_size": 3, "refill": "sample", "on_data_end": "wrap", **own},
            filter=None if keeps is None else lambda prompt, responses: keeps(prompt.data["row"]),
        )
        made = trl_adapter.april_trainer(trl.GRPOTrainer)(
            tiny_model(), rollouts, trl.prompts(ROWS), num_generations=self.n, generation_batch_size=2 * self.n,
            reward_funcs=[
                lambda answer, completion_ids, **others: [
                    self.judged(row, judge, len(ids)) for row, ids in zip(answer, completion_ids, strict=True)
                ]
            ],
        )  # fmt: skip
        made.folder, start, batches = self.folder, self.step, list[list[Response]]()

        def trained(output: Any) -> None:
            if made.state.global_step >= start + saved:
                made.folder = None
            advantages = output["advantages"].tolist() if "group_quorum" in own else [None] * len(output["logprobs"])
            samples, rows = rollouts._last_batch.samples, made.scored[-1]  # type: ignore[union-attr]
            batches.append([
                Response(row["answer"], s.id.index, list(ids), s.versions[:, 1].tolist(), None, advantage)
                for s, row, ids, advantage in zip(samples, rows, output["completion_ids"], advantages, strict=True)
            ])  # fmt: skip

        made.optimizer_step = trained
        made.train(start + saved + more, str(self.folder / f"checkpoint-{start}") if start else None)
        books = {name: Book.of(ledger) for name, ledger in rollouts.ledger.items()}
        return Life(batches, books["prompts"], books["tokens"], books["prompts"].observed)

    def state_file(self) -> Path:
        return self.folder / f"checkpoint-{self.step}" / "april_state.msgpack"


class TrlAsync(Player):
    groups, quorum_samples = 2, 4

    def _live(self, saved: int, more: int, own: Any, judge: Any, keeps: Any) -> Life:
        trl_async.install(self.monkeypatch)
        server, start = FakeVllmServer(max_running=6, turns=2), self.step
        with ServerThread(server):
            worker = trl_adapter.rollout_worker(
                {"engine": {"kind": "vllm", "urls": [server.url], **KNOWN}, "max_staleness": 4, **own},
                weights_dir=self.folder / "weights",
                filter=None if keeps is None else lambda prompt, responses: keeps(prompt.data["row"]),
            )
            made = trl_adapter.april_async_trainer(trl_async.AsyncGRPOTrainer)(
                tiny_model(),
                lambda answer, completion_ids, **others: [
                    self.judged(row, judge, len(ids)) for row, ids in zip(answer, completion_ids, strict=True)
                ],
                {"num_generations": self.n, "per_device_train_batch_size": self.n},
                train_dataset=trl.conversations(ROWS), rollout_worker=worker,
            )  # fmt: skip
            made.folder, fetched = self.folder, trl_async.noted(worker)

            def trained() -> None:
                if made.state.global_step > start + saved:
                    made.folder = None

            made.after_step = trained
            made.train(start + saved + more, str(self.folder / f"checkpoint-{start}") if start else None)
        batches = [[self._response(s, "group_quorum" in own, row.advantage)
                    for s, row in zip(batch.samples, rows, strict=True)]
                   for batch, rows in zip(fetched, made.trained, strict=False)]  # fmt: skip
        books = {name: Book.of(ledger) for name, ledger in worker.ledger.items()}
        for batch in fetched[len(made.trained) :]:  # fetched ahead, and in the checkpoint as held
            ahead = {"prompts": len(batch.group_sizes), "tokens": sum(len(s.tokens) for s in batch.samples)}
            for name, count in ahead.items():
                books[name].delivered -= count
                books[name].held += count
        return Life(batches, books["prompts"], books["tokens"], books["prompts"].observed)

    def _response(self, s: Any, quorum: bool, advantage: float) -> Response:
        versions = (s.versions[:, 1] - 1).tolist()  # the first update is that of the weights at the start
        return Response(
            s.prompt.data["row"], s.id.index, s.tokens.tolist(), versions, None, advantage if quorum else None
        )

    def state_file(self) -> Path:
        return self.folder / f"checkpoint-{self.step}" / "april_state.msgpack"


class OpenRlhf(Player):
    groups, quorum_samples = openrlhf.GROUPS, None
    saved: dict[str, Any] | None = None

    def _live(self, saved: int, more: int, own: Any, judge: Any, keeps: Any) -> Life:
        def answer(query: str, prompt: str, label: str) -> dict[str, Any]:
            score = 0.5 if keeps is None or keeps(int(label)) else float(int(label) % 8 == 0)  # on a bound
            return {"rewards": self.judged(int(label), judge), "scores": score}

        settings = {"over_sampling_batch_size": 2 * openrlhf.GROUPS, **own}
        batches: list[list[Response]] = []
        with openrlhf.Run(settings, rows=ROWS, algo__dynamic_filtering_enable=keeps is not None) as run:
            for engine in run.engines:
                engine.answer = answer
            if self.saved is not None:
                run.loader.load_state_dict(self.saved)
                run.push()
            for number in range(saved + more):
                run.step()
                samples = run.rollouts.batch.samples  # type: ignore[union-attr]
                given = zip(samples, run.responses[-len(samples) :], strict=True)
                batches.append([self._response(*both) for both in given])
                if number < saved:
                    self.saved = run.loader.state_dict()
            books, drawn = self._books(run)
        return Life(batches, books["prompts"], books["tokens"], drawn)

    def _books(self, run: Any) -> tuple[dict[str, Book], int]:
        """The ledgers, and the prompts given, at a moment between two draws: generation may go on meanwhile."""
        for _ in range(200):
            before = self._drawn(run)
            books = {name: Book.of(ledger) for name, ledger in run.rollouts.scheduler.ledger().items()}
            drawn = self._drawn(run)
            if before == books["prompts"].observed == drawn:
                break
            time.sleep(0.005)
        return books, drawn

    def _drawn(self, run: Any) -> int:
        given: int = run.loader._loader._at - len(run.rollouts._prompts.carried.ahead)
        return given

    def _response(self, sample: Any, given: dict[str, Any]) -> Response:
        tokens = given["observation_tokens"][given["action_ranges"][0][0] :]
        uncut = uncut_of(sample.prompt.token_ids, sample.id)
        return Response(int(given["label"]), sample.id.index, tokens, sample.versions[:, 1].tolist(), uncut)


def uncut_of(prompt: Any, key: tuple[int, int]) -> list[int]:
    """What the simulated engines say at once; EOS in place of the last token, unless the limit of 100 ends it."""
    length = LENGTHS.sample(*key)
    made = synthetic_response(np.array(prompt, np.int32), key, 0, min(length, 100), VOCAB, (0,))[0]
    tokens: list[int] = made.tolist()
    return tokens if length > 100 else [*tokens[:-1], 0]


HOOKS: dict[str, Callable[..., Any]] = {}
"""Reward and filter of the present player of slime, which loads its functions by name."""


async def slime_reward(args: Any, sample: Any, **kwargs: Any) -> float:
    return float(HOOKS["reward"](sample.group_index, sample.response_length))


def slime_filter(args: Any, group: list[Any], **kwargs: Any) -> bool:
    return bool(HOOKS["keeps"](group[0].group_index))


class Slime(Player):
    def _live(self, saved: int, more: int, own: Any, judge: Any, keeps: Any) -> Life:
        HOOKS.update(reward=lambda row, length: self.judged(row, judge, length), keeps=keeps)
        flags = {
            "april": own, "n_samples_per_prompt": self.n, "custom_rm_path": "adapters.players.slime_reward",
            "dynamic_sampling_filter_path": None if keeps is None else "adapters.players.slime_filter",
            "custom_reward_post_process_path": "april.adapters.slime.post_process_rewards",
        }  # fmt: skip
        batches = []
        with slime.installed(), slime.Run(self.folder, self.step, **flags) as run:
            for rollout_id in range(self.step, self.step + saved + more):
                batches.append([self._response(sample) for sample in run.samples(rollout_id)])
                if rollout_id < self.step + saved:
                    run.data.save(rollout_id)
            books = {name: Book.of(ledger) for name, ledger in run.scheduler.ledger().items()}
            given = run.data.groups - len(run.session._groups.ahead)
        return Life(batches, books["prompts"], books["tokens"], given)

    def _response(self, s: Any) -> Response:
        versions = [int(v.partition(".")[2]) for a, b, v in s.metadata["april"]["spans"] for _ in range(a, b)]
        prompt, tokens = s.tokens[: -s.response_length], s.tokens[-s.response_length :]
        sample = s.index % self.n
        uncut = uncut_of(prompt, (s.group_index, sample)) if s.index >= 0 else None
        return Response(s.group_index, sample if s.index >= 0 else s.index, tokens, versions, uncut,
                        s.metadata["april"].get("advantage"))  # fmt: skip

    def state_file(self) -> Path:
        return self.folder / "rollout" / f"april_carry_{self.step - 1}.msgpack"


class Areal(Player):
    groups, quorum_samples = areal.GROUPS, None
    generation: str | None = None
    """None: as AReaL's placement has it, which is continuous."""

    def _live(self, saved: int, more: int, own: Any, judge: Any, keeps: Any) -> Life:
        areal.install(self.monkeypatch)
        from april.adapters.areal import PPOTrainer

        areal.SERVER[:] = [areal.Server(lambda row: 4 + row % 5, lambda row, so_far: row % 3 == so_far == 0)]
        config = areal.config(self.folder)
        run = PPOTrainer(config, areal.rows(ROWS), april={"check": True, **own})
        workflow = areal.Workflow(config)
        workflow.reward = lambda row: self.judged(row, judge)
        accepts = None if keeps is None else lambda group: keeps(int(group["input_ids"][0][1]))
        try:
            run.train(workflow, saved, accepts)
            run.train(workflow, more, accepts, save=False)
            run.rollout.pause()
            rollouts = run._april.rollouts
            books = {name: Book.of(ledger) for name, ledger in rollouts.scheduler.ledger().items()}
            given = run.train_dataloader.at - len(rollouts.prompts.carried.ahead)
        finally:
            run.close()
        batches = [[r for group in batch for r in self._responses(group)] for batch in run.trained]
        return Life(batches, books["prompts"], books["tokens"], given)

    def _responses(self, group: dict[str, Any]) -> list[Response]:
        found = []
        for i, (ids, mask) in enumerate(zip(group["input_ids"], group["loss_mask"].bool(), strict=True)):
            row, versions = int(ids[1]), group["versions"][i][mask]
            # the stand-in's log-probabilities name the weights that wrote a token
            assert ((-group["logprobs"][i][mask] - 1) * 1000).round().int().tolist() == versions.tolist()
            uncut = [*range(100, 103 + row % 5), areal.EOS]
            found.append(Response(row, i, ids[mask].tolist(), versions.tolist(), uncut))
        return found

    def state_file(self) -> Path:
        (info,) = self.folder.rglob("info.json")
        return info.parent / json.loads(info.read_text())["loader"]["april"]


class Verl(Player):
    mine: dict[str, Any] | None = None

    def _live(self, saved: int, more: int, own: Any, judge: Any, keeps: Any) -> Life:
        changes: dict[str, Any] = {f"april__{name}": value for name, value in own.items()}
        if "group_quorum" in own:
            changes["algorithm__adv_estimator"] = "april_grpo"

        def reward_of(row: int, sample: int, response: list[int]) -> float:
            return self.judged(row, judge, len(response)) + (sample if keeps is None or keeps(row) else 0)

        run = verl.Trainer(
            length_of, reward_of, actor_rollout_ref__rollout__n=self.n,
            algorithm__filter_groups__enable=keeps is not None, **changes,
        )  # fmt: skip
        try:
            if self.mine is not None:
                run.load(self.folder, self.mine)
            batches = []
            for number in range(saved + more):
                delivery = run.step()
                advantages = [float(s.reward - np.mean(s.baseline_rewards)) for s in delivery.batch.samples]
                batches.append([self._response(*of) for of in zip(run.last.items(), advantages, strict=True)])
                if number < saved:
                    self.mine = run.save(self.folder)
                run.update()
            books = {name: Book.of(ledger) for name, ledger in run.ledgers().items()}
        finally:
            run.close()
        return Life(batches, books["prompts"], books["tokens"], run.drawn - len(run.run.prompts.offered))

    def _response(self, name: tuple[str, dict[str, Any]], advantage: float) -> Response:
        key, stored = name
        row, sample = int(key[1:].split("_")[0]), int(key.split("_")[1])
        versions = [int(v.partition(".")[2]) for a, b, v in stored["spans"] for _ in range(a, b)]
        uncut = [*range(101, 100 + length_of(row, sample)), verl.EOS]
        return Response(row, sample, stored["tokens"], versions, uncut, advantage)

    def state_file(self) -> Path:
        return self.folder / STATE_FILE


def length_of(row: int, sample: int) -> int:
    """From 3 to 37."""
    return 3 + (11 * row + 5 * sample) % 35


PLAYERS: dict[str, type[Player]] = {
    "trl": Trl, "trl_async": TrlAsync, "openrlhf": OpenRlhf, "slime": Slime, "areal": Areal, "verl": Verl,
}  # fmt: skip
