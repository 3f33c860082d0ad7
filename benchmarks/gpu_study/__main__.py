"""The study on GPUs by one command, which can be interrupted and begun again. It downloads models and questions.

    python -m benchmarks.gpu_study plan --gpus 1      what it would take, computed
    python -m benchmarks.gpu_study run --gpus 1       run what is missing, then write tables
    python -m benchmarks.gpu_study run --gpus 8       the same on eight GPUs: four servers, four ranks that train
    python -m benchmarks.gpu_study status --gpus 1    what is there
    python -m benchmarks.gpu_study page --gpus 1      tables and picture of what is there
    python -m benchmarks.gpu_study smoke              the script itself in a minute: a random model, no download

``--only qwen3-0.6b/sync/1000`` runs one training, which is how to begin.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from april.serialization.state_file import write_atomic
from benchmarks.gpu_study import design as designs
from benchmarks.gpu_study.design import GpuDesign
from benchmarks.gpu_study.plan import table
from benchmarks.gpu_study.servers import gpus_of, serving
from benchmarks.study.page import draw, figures
from benchmarks.study.runner import Cost, Runner, gather, outcome_path, status, write_results
from benchmarks.study.training import Settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; returns 1 if a training failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("plan", "run", "status", "page", "smoke", "train"))
    parser.add_argument("--gpus", type=int, default=1, help="size: 1 or 8, or what the design has")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-study"), help="directory of everything")
    parser.add_argument("--only", default="", help="only trainings whose name begins so; of `train`, the one")
    parser.add_argument("--design", type=Path, default=designs.DESIGN)
    parser.add_argument(
        "--server-python", default=sys.executable, help="of the environment with vLLM or SGLang, if it is another one"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of `smoke`")
    parser.add_argument("--shape", choices=("tiny", "0.6b", "1.7b", "4b"), default="tiny", help="of `smoke`: Qwen3's")
    parser.add_argument("--urls", nargs="*", default=[], help="of `train`: its servers, which `run` starts")
    options = parser.parse_args(arguments)
    if options.what == "smoke":
        from benchmarks.gpu_study.smoke import write

        options.design, options.what = write(options.out / "smoke", options.device, options.shape), "run"
        options.out /= "smoke"
    design = designs.read(options.design)
    trainings = design.of(options.gpus)
    chosen = {name: settings for name, settings in trainings.items() if name.startswith(options.only)}
    if options.what == "plan":
        print("Computed by april's simulation, not measured.\n")
        print("\n".join(table(design, options.gpus)))
        return 0
    if options.what == "train":  # in a process of its own, or in each rank's
        from benchmarks.gpu_study.training import train

        settings = chosen[options.only]
        say = partial(print, flush=True)
        train(options.out, options.only, settings, design.tasks[settings.task], options.urls, say)
        return 0
    from benchmarks.gpu_study.training import GpuOutcome

    if options.what == "status":
        print("\n".join([*status(options.out, chosen, GpuOutcome), *under_way(options.out, chosen)]))
        return 0
    if options.what == "run":
        say = partial(print, flush=True)
        make = partial(launch, design=design, options=options)
        runner = Runner(options.out, chosen, 0, say, make=make, starts=False, kind=GpuOutcome)
        try:
            fine = runner.run()
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
            return 130
        if not fine:
            print("\n".join(runner.failed), file=sys.stderr)
            return 1
    publish(design, options.out, options.gpus)
    return 0


def launch(out: Path, name: str, settings: Settings, *, design: GpuDesign, options: argparse.Namespace) -> Cost:
    """Run one training: its servers, and a process per rank, whose output is shown and kept.

    Raises:
        RuntimeError: it did not end well; its log is named.
    """
    sizes, began, cpu = design.tasks[settings.task], time.perf_counter(), _children_s()
    logs = out / "logs" / name.replace("/", "--")
    logs.mkdir(parents=True, exist_ok=True)
    words = ["-m", "benchmarks.gpu_study", "train", "--gpus", str(sizes.gpus), "--out", str(out), "--only", name]
    words += ["--design", str(options.design)]
    if sizes.trainers > 1:
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={sizes.trainers}", *words]
    with serving(sizes, logs, options.server_python) as urls, (logs / "train.log").open("a", encoding="utf-8") as log:
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpus_of(sizes)[0]}
        command = [sys.executable, *words, *(["--urls", *urls] if urls else [])]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    print(line, end="", flush=True)
                    log.write(line)
                    log.flush()
                code = process.wait()
            except BaseException:
                process.terminate()
                raise
    if code or not outcome_path(out, name).exists():
        raise RuntimeError(f"it ended with {code}; {logs / 'train.log'} says why")
    return Cost(name, _children_s() - cpu, time.perf_counter() - began)


def _children_s() -> float:
    """Return CPU seconds of the processes that have ended."""
    spent = os.times()
    return spent.children_user + spent.children_system


def under_way(out: Path, trainings: dict[str, Settings]) -> list[str]:
    """Return a line for each training that has begun and not ended, by its last checkpoint."""
    from benchmarks.gpu_study.training import Notes, checkpoint_path, notes_path

    found = []
    for name, settings in trainings.items():
        if checkpoint_path(out, name).exists() and not outcome_path(out, name).exists():
            notes = msgspec.json.decode(notes_path(out, name).read_bytes(), type=Notes)
            last = notes.evaluations[-1]
            found.append(
                f"{name}: {notes.step} of {settings.steps} steps, {last.wall_s / 3600:.2f} h, held-out reward "
                f"{notes.evaluations[0].reward:.3f} at first, {last.reward:.3f} now"
            )
    return found


def publish(design: GpuDesign, out: Path, gpus: int) -> None:
    """Write results, figures, picture and tables of the outcomes that are there."""
    from benchmarks.gpu_study.page import page
    from benchmarks.gpu_study.training import GpuOutcome

    found: Any = gather(out, design.of(gpus), GpuOutcome)
    out.mkdir(parents=True, exist_ok=True)
    write_results(out / f"results-{gpus}.jsonl", found)
    computed = json.dumps(figures(design, found), indent=1, allow_nan=False) + "\n"
    write_atomic(out / f"figures-{gpus}.json", computed.encode())
    if found:
        draw(design, found, out / f"study-{gpus}.png", "gpu_s")
    text = page(design, found, gpus)
    write_atomic(out / f"page-{gpus}.md", text.encode())
    print(text)


if __name__ == "__main__":
    sys.exit(main())
