"""AReaL's default mode, a controller with workers: what april's import line says there, and the call behind that."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


def test_the_import_line_is_refused_and_the_call_that_stands_against_it(tmp_path: Path) -> None:
    """A real RolloutController with a worker comes up; it has no ``_engine``, whose executor april would replace."""
    from short_runs import group

    env = {name: value for name, value in os.environ.items() if name != "AREAL_SPMD_MODE"}
    env |= {"PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE))), "HF_HUB_OFFLINE": "1"}
    log = tmp_path / "log"
    command = [sys.executable, str(HERE / "single_controller.py"), str(tmp_path)]
    with log.open("w") as file, group(command, cwd=ROOT, env=env, stdout=file, stderr=file) as process:
        process.wait(200)
    said = log.read_text(errors="replace")
    assert "ConfigError AReaL's single-controller mode" in said, said[-4000:]
    assert "UP RolloutController ['rollout/0']" in said, said[-4000:]
    assert "AttributeError: 'RolloutController' object has no attribute '_engine'" in said, said[-4000:]


def main(directory: Path) -> None:
    """Print what happens."""
    import tiny_areal
    from areal.api import LocalInfServerInfo
    from areal.api.alloc_mode import ModelAllocation
    from areal.api.cli_args import SchedulingSpec
    from areal.engine.sglang_remote import RemoteSGLangEngine
    from areal.infra.scheduler.local import LocalScheduler
    from areal.trainer.rl_trainer import PPOTrainer as ArealTrainer
    from model_server import ModelServer, started

    from april.adapters.areal import PPOTrainer

    config = tiny_areal.config(directory, steps=1, offpolicyness=1)
    try:
        PPOTrainer(config, tiny_areal.rows())
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    # the same without the refusal
    for path in (config.cluster.fileroot, config.cluster.name_resolve.nfs_record_root):
        Path(path).mkdir(exist_ok=True)
    config.rollout.scheduling_spec = (
        SchedulingSpec(cpu=1, gpu=0, mem=1, cmd="python -m areal.infra.rpc.rpc_server"),
    )
    server = ModelServer(tiny_areal.model(directory), places=1, token_s=0.01)
    host, port = started(server).split(":")
    controller = RemoteSGLangEngine.as_controller(config.rollout, LocalScheduler(exp_config=config, gpu_devices=[0]))
    here = LocalInfServerInfo(host=host, port=int(port), process=None)
    controller.initialize(role="rollout", server_infos=[here])
    print("UP", type(controller).__name__, [worker.id for worker in controller.workers], flush=True)
    ArealTrainer._init_rollout = lambda *a, **k: controller
    trainer = object.__new__(PPOTrainer)
    trainer.config, trainer.actor_alloc = config, ModelAllocation.from_str(config.actor.backend, name="actor")
    try:
        trainer._init_rollout(config.rollout)
    except Exception:
        traceback.print_exc()
    controller.destroy()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
