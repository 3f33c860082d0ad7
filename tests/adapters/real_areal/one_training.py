"""One process of a training, for ``short_runs``: what was trained, and whose every token is, as JSON.

    .venv/areal/bin/python tests/adapters/real_areal/one_training.py DIRECTORY --steps 5
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

# before areal is imported
os.environ |= {"AREAL_SPMD_MODE": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}

import functions_of_a_user
import tiny_areal
import torch
from areal.workflow.rlvr import RLVRWorkflow
from model_server import ModelServer, started

from april.adapters.areal import PPOTrainer

PLACES = 16


class Watch:
    """Beside a trainer: its batches, and for each token the difference to weights that the server had.

    Args:
        server: of this process.
        directory: every version's weights are kept there, for a later process too.
    """

    def __init__(self, server: ModelServer, directory: Path) -> None:
        self.server, self._directory = server, directory / "weights"
        self._directory.mkdir(exist_ok=True)
        self.models: dict[int, Any] = {}
        """By version, of this process and those before it."""
        self.steps: list[dict[str, Any]] = []

    def begin(self, version: int) -> None:
        """The weights that the server has now are of this version; those that an earlier process had are read."""
        for path in self._directory.iterdir():
            model = copy.deepcopy(self.server.models[0])
            model.load_state_dict(torch.load(path, weights_only=True))
            self.models[int(path.stem)] = model
        self._offset = version - len(self.server.models) + 1

    def _learn(self) -> None:
        """What the server has loaded since."""
        for index, model in enumerate(self.server.models):
            version = index + self._offset
            if version not in self.models and version >= 0:
                self.models[version] = model
                torch.save(model.state_dict(), self._directory / f"{version}.pt")

    def trained(self, version: int, batch: list[dict[str, Any]]) -> None:
        """A batch, as it goes into the update: everything but ``input_ids`` and ``versions`` is moved by one."""
        self._learn()
        found: dict[str, Any] = {
            "step": version, "prompts": [tiny_areal.number(group["input_ids"][0]) for group in batch],
            "rewards": [group["rewards"].tolist() for group in batch], "spans": [], "ages": [],
            "tokens": 0, "older": 0, "own": 0.0, "other": 0.0, "present": 0.0, "trainer_older": 0.0,
        }  # fmt: skip
        for group in batch:
            for i in range(len(group["input_ids"])):
                self._row(found, version, {key: group[key][i] for key in group})
        self.steps.append(found)

    @torch.no_grad()
    def _row(self, found: dict[str, Any], version: int, row: dict[str, Any]) -> None:
        mask = row["loss_mask"].bool()
        versions = torch.roll(row["versions"], -1, -1)[mask]
        behaviour, recomputed = row["logprobs"][mask], row["prox_logp"][mask]
        ids = row["input_ids"].long()[row["attention_mask"].bool()]
        found["tokens"] += len(versions)
        found["older"] += int((versions < version).sum())
        found["ages"] += (version - versions).tolist()
        found["spans"].append(len(set(versions.tolist())))
        for label in set(versions.tolist()):
            here = versions == label
            for of, name in ((label, "own"), (label + 1, "other")):
                if of == label or of in self.models:
                    logprobs = torch.log_softmax(self.models[of](ids[None]).logits[0, :-1], -1)
                    said = logprobs.gather(1, ids[1:, None])[:, 0][mask[: len(ids) - 1]]
                    found[name] = max(found[name], float((said - behaviour)[here].abs().max()))
        difference = (recomputed - behaviour).abs()
        for name, here in (("present", versions == version), ("trainer_older", versions < version)):
            if here.any():
                found[name] = max(found[name], float(difference[here].max()))


def trainer_of(watch: Watch) -> Any:
    """april's trainer with the actor for a CPU, watched."""

    class Actor(tiny_areal.CpuActor):
        def ppo_update(self, data: Any, *args: Any, **kwargs: Any) -> None:
            watch.trained(self.get_version(), data)
            super().ppo_update(data, *args, **kwargs)

    class Trainer(PPOTrainer):  # type: ignore[misc]
        def _create_train_engine(self, actor_config: Any, alloc: Any) -> Any:
            engine = Actor(config=actor_config)
            engine.create_process_group(parallel_strategy=alloc.parallel)
            return engine

    return Trainer


def main() -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--generation")
    parser.add_argument("--offpolicyness", type=int, default=1)
    parser.add_argument("--token-s", type=float, default=0.004)
    parser.add_argument("--filter", action="store_true")
    parser.add_argument("--evaluate", action="store_true")
    given = parser.parse_args()
    tiny_areal.one_rank()
    server = ModelServer(tiny_areal.model(given.directory), places=PLACES, token_s=given.token_s)
    os.environ["AREAL_LLM_SERVER_ADDRS"] = started(server)
    watch = Watch(server, given.directory)
    config = tiny_areal.config(
        given.directory, steps=given.steps, offpolicyness=given.offpolicyness, evaluate=given.evaluate
    )
    trainer = trainer_of(watch)(
        config, train_dataset=tiny_areal.rows(), valid_dataset=tiny_areal.rows(8) if given.evaluate else None,
        april={"check": True} | ({"generation": given.generation} if given.generation else {}),
    )  # fmt: skip
    recovered = trainer.recover_info
    watch.begin(0 if recovered is None else recovered.last_step_info.global_step + 1)

    def workflow(sampling: Any) -> Any:
        return RLVRWorkflow(
            functions_of_a_user.share_of_even, sampling, trainer.tokenizer, get_input_ids_fn=functions_of_a_user.ids_of
        )

    trainer.train(
        workflow=workflow(config.gconfig),
        eval_workflow=workflow(config.gconfig.new(n_samples=1)) if given.evaluate else None,
        dynamic_filter_fn=functions_of_a_user.differs if given.filter else None,
    )
    seen: dict[str, Any] = {
        "steps": watch.steps, "drawn": trainer.train_dataloader.state_dict().get("_num_yielded"),
        "server": {"made": server.made, "aborted": server.aborted, "requests": server.begun,
                   "weights": server.weights, "violations": server.violations},
    }  # fmt: skip
    rollouts = trainer.rollout.workflow_executor.rollouts
    return seen | {"ledgers": {name: book.as_dict() for name, book in rollouts.scheduler.ledger().items()}}


if __name__ == "__main__":
    faulthandler.enable()
    try:
        print("SEEN " + json.dumps(main(), default=lambda o: getattr(o, "__dict__", str(o))), flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    # threads of the servers and of AReaL's pools never end
    os._exit(0)
