"""Defines the commands of ``april`` (typer)."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import april
from april.core.versions import OnStale
from april.errors import AprilError, ConfigError, RecordError
from april.simulate import Placement
from april.text.install_command import install
from april.text.server_text import printable

app = typer.Typer(
    name="april", help="Active partial rollouts for LLM reinforcement learning.", no_args_is_help=True,
    pretty_exceptions_enable=False,
)  # fmt: skip


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"april {april.__version__}")
        raise typer.Exit


def _no_record(out: Path) -> Path:
    """Refuse an output file that is the record of a run, so that no record is overwritten."""
    from april.record.file import is_record

    with suppress(RecordError):  # a file that cannot be read is replaced, if that is permitted
        if out.is_file() and is_record(out):
            raise typer.BadParameter(printable(f"{out} is the record of a run; choose another file"))
    return out


@contextmanager
def _errors_as_messages(out: Path | str = "", usage: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Exit with a message instead of a traceback after an error in the block.

    The exit code is 2 if the command line is wrong: after a ConfigError or an error from outside april whose type is in
    ``usage``, and after an OSError if ``out``, the output, is given. It is 1 after any other AprilError."""
    known: tuple[type[Exception], ...] = (AprilError, *usage)
    try:
        yield
    except known as error:
        if not isinstance(error, AprilError) or (ConfigError in usage and isinstance(error, ConfigError)):
            raise typer.BadParameter(printable(str(error))) from None
        Console(stderr=True, markup=False, highlight=False).print(printable(str(error)), soft_wrap=True)
        raise typer.Exit(1) from None
    except OSError as error:
        if not out:
            raise
        raise typer.BadParameter(f"cannot write {out}: {error.strerror}; choose another --out") from None


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print april's version.")
    ] = False,
) -> None:
    """Active partial rollouts for LLM reinforcement learning."""


@app.command()
def doctor(
    urls: Annotated[
        list[str] | None, typer.Argument(help="Addresses of servers, such as http://127.0.0.1:8000.", metavar="URL")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with april's configuration, instead of addresses.", metavar="FILE")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the servers' key.", metavar="NAME")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, max=15, help="Time limit in seconds.")] = 15.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check what these servers can do, what to change in their setup, and whether april gives exact results with them.

    Exact: the weights and the log-probability of every token are known, and an aborted request loses no token.

    Exit code 0: april can use the servers. 1: it cannot, or cannot reach them. 2: the command line or file is wrong.
    """
    from april.doctor.examine import TimeLimits
    from april.doctor.run import examine, present

    each = min(4.0, timeout / 3)
    with _errors_as_messages(usage=(ConfigError,)):
        report = examine(urls or [], config, api_key_env, TimeLimits(timeout, each))
    raise typer.Exit(present(report, as_json))


@app.command()
def replay(
    path: Annotated[Path, typer.Argument(help="A record: what RolloutScheduler(record=...) has written.")],
    story: Annotated[
        str | None, typer.Option(help="Show what happened to one sample, such as g3.s1.", metavar="ID")
    ] = None,
) -> None:
    """Replay the events of a recorded run: check that april makes the same decisions again, and that every token and
    prompt it received is counted as delivered, held or dropped.

    Exit code 0: all checks pass. 1: a check fails, or the file was changed or cannot be read. 2: the command line is
    wrong.
    """
    from april.core.types import SampleId
    from april.record.replay import replay as run

    console = Console(markup=False, highlight=False)
    named = re.fullmatch(r"g(-?\d{1,18})\.s(\d{1,9})", story or "g0.s0")
    if named is None:
        raise typer.BadParameter(f"no sample is named {story!r}; a name looks like g3.s1: group 3, sample 1")
    with _errors_as_messages():
        done = run(path, whole_story=story is not None)
    table = Table(show_header=False, box=None)
    for name, text in done.rows().items():
        table.add_row(name, printable(text))
    console.print(table)
    if story is not None:
        console.print(printable(done.core.story(SampleId(int(named[1]), int(named[2])))), soft_wrap=True)


@app.command()
def report(
    paths: Annotated[
        list[Path], typer.Argument(help="Records: what RolloutScheduler(record=...) has written.", metavar="RUN...")
    ],
    out: Annotated[
        Path, typer.Option(help="The page.", metavar="FILE", callback=_no_record)
    ] = Path("runs/report.html"),
) -> None:
    """Write an HTML report on a run, to open in a browser; several runs are shown side by side.

    Exit code 0: the report is written. 1: a record cannot be read. 2: the command line is wrong.
    """
    console = Console(markup=False, highlight=False)
    if find_spec("matplotlib") is None:
        typer.echo(f"the report needs matplotlib: {install('plot')}", err=True)
        raise typer.Exit(1)
    from april.serialization.state_file import write_atomic
    from april.view.report import ReportFigures, off_policy_sentence, page, speed_up_sentence
    from april.view.run_data import read_run

    with _errors_as_messages(out):
        with console.status("reading") as status:
            runs = []
            for path in paths:
                status.update(Text(f"reading {printable(str(path))}"))
                runs.append(read_run(path))
            found = [ReportFigures.of(run) for run in runs]
            status.update("drawing")
            text = page(runs, found)
        write_atomic(out, text.encode())
    for run, each in zip(runs, found, strict=True):
        of = f" of {run.path}" if len(runs) > 1 else ""
        console.print(printable(f"Did april help{of}? {speed_up_sentence(each.gain)}"), soft_wrap=True)
        console.print(printable(f"The health of learning{of}: {off_policy_sentence(each.health)}"), soft_wrap=True)
    console.print(f"wrote {printable(str(out))}", soft_wrap=True)


@app.command()
def watch(
    path: Annotated[
        Path, typer.Argument(help="The record that RolloutScheduler(record=...) writes.", metavar="RUN")
    ],
    once: Annotated[bool, typer.Option("--once", help="Print the state of the run once, and exit.")] = False,
) -> None:
    """Show the state of a run that another process executes, from its record, until the run ends or Ctrl-C is pressed.

    Exit code 0: the run has ended, or you stopped watching. 1: the file is not a record, or does not exist with --once.
    2: the command line is wrong.
    """
    from april.view.watch import watch as follow

    console = Console(markup=False, highlight=False)
    with _errors_as_messages():
        there = follow(path, console, once=once)
    if not there:
        raise typer.Exit(1)


# The parameters of simulate and plan have the names of the Workload fields that they set.
_ENGINES, _BATCH, _LENGTHS, _RUN = "Engines", "Batch and staleness", "Response lengths", "Simulation"
_TRAINER = "Trainer"


def _in(panel: str, text: str, *flags: str, **limits: Any) -> Any:
    """Return a typer option that ``--help`` shows in the panel ``panel``."""
    return typer.Option(*flags, help=text, rich_help_panel=panel, **limits)


# The options of both simulate and plan; only simulate has defaults for all of them.
_Model = Annotated[str | None, _in(_ENGINES, "Named model.")]
_Gpu = Annotated[str | None, _in(_ENGINES, "Named GPU.")]
_TensorParallel = Annotated[int | None, _in(_ENGINES, "GPUs per engine.", min=1)]
_EngineCount = Annotated[int | None, _in(_ENGINES, "Number of engines.", min=1)]
_Speculative = Annotated[str | None, _in(_ENGINES, (
    "Factor on the tokens per second that speculative decoding brings at a number of sequences per engine, such as "
    "8:2,64:1; linear between the points."
), metavar="N:FACTOR,...")]  # fmt: skip
_Groups = Annotated[int | None, _in(_BATCH, "N, prompt groups per batch.", "--rollout-batch-size", min=1)]
_Samples = Annotated[int | None, _in(_BATCH, "n, responses per prompt.", "--n-samples-per-prompt", min=1)]
_MaxStaleness = Annotated[int | None, _in(_BATCH, "Maximum weight updates between a token and its training.", min=0)]
_MaxResponseLen = Annotated[int | None, _in(_LENGTHS, "Maximum tokens of a response.", min=1)]
_PromptLen = Annotated[int | None, _in(_LENGTHS, "Tokens of a prompt.", min=1)]
_TrainTime = Annotated[str | None, _in(_TRAINER, (
    "Training time of one batch: seconds (40), or a multiple (0.5x) of the time in which fully used engines generate a "
    "batch. With this option, april simulate shows the whole loop, generation and training."
))]  # fmt: skip
_Placement = Annotated[Placement | None, _in(_TRAINER, (
    "Whether the trainer has GPUs of its own (separate, the default with --train-time) or shares the GPUs of the "
    "engines (colocated), which then stop during training."
))]  # fmt: skip


@app.command()
def simulate(
    model: _Model = "qwen3-4b",
    gpu: _Gpu = "h100",
    tensor_parallel: _TensorParallel = 2,
    engines: _EngineCount = 4,
    groups: _Groups = 32,
    samples: _Samples = 8,
    over: Annotated[
        int | None, _in(_BATCH, "N', groups in progress with april; default 2 N.", "--over-sampling-batch-size", min=1)
    ] = None,
    in_flight: Annotated[
        int | None, _in(_BATCH, "Samples in flight in the refill mode; default N x n.", "--max-in-flight", min=1)
    ] = None,
    max_staleness: _MaxStaleness = 5,
    on_stale: Annotated[OnStale, _in(_BATCH, "What happens to samples older than max_staleness.")] = OnStale.FINISH,
    group_quorum: Annotated[
        float,
        _in(_BATCH, (
            "Share of a group's responses that must be finished before any can be delivered. Below 1, the modes april "
            "and refill are simulated both with this share and with 1."
        )),
    ] = 1.0,
    train_time: _TrainTime = None,
    placement: _Placement = None,
    fetch_ahead: Annotated[int, _in(_TRAINER, "Batches that the trainer requests ahead during training.", min=0)] = 0,
    tail_batching: Annotated[
        int | None,
        _in(_BATCH, (
            "Also simulate tail batching (partial_rollout: false) with this N': strictly on-policy; unfinished prompts "
            "begin again in rounds of their own."
        ), min=1),
    ] = None,
    speculative: _Speculative = None,
    max_response_len: _MaxResponseLen = 16_384,
    prompt_len: _PromptLen = 128,
    lengths_file: Annotated[
        Path | None,
        _in(_LENGTHS, (
            'JSONL file of your own response lengths, one line per prompt: {"lengths": [812, 4077]} or a number.'
        ),
            "--lengths"),
    ] = None,
    median_len: Annotated[float | None, _in(_LENGTHS, "Median of the lognormal lengths; default 2500.", min=1)] = None,
    sigma_between: Annotated[
        float | None, _in(_LENGTHS, "Log-length spread between prompts; default 0.62.", min=0, max=5)
    ] = None,
    sigma_within: Annotated[
        float | None, _in(_LENGTHS, "Log-length spread within a prompt; default 0.51.", min=0, max=5)
    ] = None,
    steps: Annotated[int, _in(_RUN, "Steps per mode.", min=1)] = 50,
    ramp: Annotated[int, _in(_RUN, "First steps to leave out of the figures.", min=0)] = 10,
    seed: Annotated[int, _in(_RUN, "Seed of the lengths.", min=0)] = 0,
    out: Annotated[Path, _in(_RUN, "Directory for simulate.json.")] = Path("runs/simulate"),
) -> None:  # fmt: skip
    """Simulate your workload on virtual time, without a GPU, in three modes: sync (only the N groups of each batch),
    april (2N groups in progress, unfinished ones continue in the next step), refill (samples start as others finish).

    With --train-time the whole training loop is simulated, and continuous generation too.
    """
    given = {name: value for name, value in locals().items() if name != "out"}
    import msgspec

    from april.serialization.state_file import write_atomic
    from april.simulate.report_tables import headline, loop_table, mode_table, verdict
    from april.simulate.run import simulate as run
    from april.simulate.workload import Workload
    from april.view.bars import bars

    console, written = Console(markup=False, highlight=False), out / "simulate.json"
    with _errors_as_messages(usage=(ValueError,)):
        workload = Workload(**given)
    with _errors_as_messages(out):
        out.mkdir(parents=True, exist_ok=True)
        with bars(console) as begin:
            report = run(workload, begin)
        write_atomic(written, msgspec.json.format(msgspec.json.encode(report, enc_hook=str), indent=1))
    for line in headline(report):
        console.print(line)
    console.print(mode_table(report) if train_time is None else loop_table(report))
    for line in verdict(report):
        console.print(line)
    console.print(f"wrote {written}", soft_wrap=True)


@app.command()
def profile(
    url: Annotated[str, typer.Argument(help=(
        "Address of a server that nobody else uses during the measurement."
    ), metavar="URL")],
    kind: Annotated[str, typer.Option(help="vllm, sglang or openai.")],
    model: Annotated[str | None, typer.Option(help="Name of the model, if the server has several.")] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the server's key.", metavar="NAME")
    ] = None,
    max_in_flight: Annotated[int, typer.Option(min=8, max=4096, help="Maximum concurrent requests.")] = 64,
    tokens: Annotated[
        int, typer.Option(min=16, help="Length of the longest response, after a prompt of up to 512 tokens.")
    ] = 256,
    out: Annotated[Path, typer.Option(help="File to write.", callback=_no_record)] = Path("runs/profile.json"),
) -> None:
    """Measure the cost of decoding and prefilling on this server, with requests of random tokens, for april plan.

    Exit code 0: the cost is measured. 1: the server failed, or cannot be used. 2: the command line is wrong.
    """
    from april.simulate.profile import profile_server

    console = Console(markup=False, highlight=False)
    with _errors_as_messages(out, usage=(ConfigError,)):
        profile_server(url, kind, api_key_env, model, max_in_flight, tokens, out, console)


@app.command()
def plan(
    path: Annotated[
        Path,
        typer.Argument(
            help=(
                'JSONL of lengths, one line per prompt: {"lengths": [812, 4077]} or a number; or the record of a run, '
                "which also contains all other values."
            ),
            metavar="FILE",
        ),
    ],
    max_off_policy_share: Annotated[
        float | None, _in(_BATCH, "Largest share of trained tokens from older weights.", min=0, max=1)
    ] = None,
    max_staleness: _MaxStaleness = None,
    groups: _Groups = None,
    samples: _Samples = None,
    max_response_len: _MaxResponseLen = None,
    prompt_len: _PromptLen = None,
    model: _Model = None,
    gpu: _Gpu = None,
    tensor_parallel: _TensorParallel = None,
    engines: _EngineCount = None,
    cost: Annotated[
        Path | None, _in(_ENGINES, "File that april profile has written, with the cost of one engine.")
    ] = None,
    speculative: _Speculative = None,
    train_time: _TrainTime = None,
    placement: _Placement = None,
    out: Annotated[Path, _in(_RUN, "Directory for plan.yaml and plan.json.")] = Path("runs/plan"),
) -> None:
    """Find the best settings for these response lengths: simulate candidates, and write a configuration.

    Settings that are not given are those of the recorded run, or the defaults of april simulate.
    """
    own = ("path", "max_off_policy_share", "cost", "out")
    given = {name: value for name, value in locals().items() if value is not None and name not in ("own", *own)}
    from april.simulate.plan_run import plan_file
    from april.simulate.profile import read_cost

    console = Console(markup=False, highlight=False)
    with _errors_as_messages(f"below {out}", usage=(ValueError,)):
        if cost is not None:
            given["measured_cost"] = read_cost(cost)
        plan_file(path, given, max_off_policy_share, out, console)
