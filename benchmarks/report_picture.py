"""The picture of docs/report.md: busy places of one workload, three ways, each out of the record of a simulation.

    python -m benchmarks.report_picture

Writes docs/images/report.png, and the records and the page of all three below runs/report. 20 s of CPU.
"""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.figure import Figure

from april.record.file import RunRecord
from april.simulate.simulation import Simulation
from april.simulate.workload import Workload
from april.view.pictures import Ink, draw_places, dress, legend
from april.view.report import page
from april.view.run_data import RunData, read_run

OUT = Path("runs/report")
PICTURE = Path("docs/images/report.png")
STEPS, TRAIN_S = 20, 12.0
SHOWN_S = 420.0
MODES = {"sync": "sync", "april": "N' = 2N", "refill": "refill"}


def record(path: Path, mode: str) -> RunData:
    """The reference workload, simulated, recorded, and read again."""
    workload = Workload()
    simulation = Simulation(
        workload.core_settings(workload.modes[mode]), workload.cost, workload.lengths, engines=workload.engines,
        prompt_len=workload.prompt_len, train_s=TRAIN_S, record=RunRecord(path),
    )  # fmt: skip
    simulation.run(STEPS)
    simulation.close()
    return read_run(path)


def draw(runs: dict[str, RunData]) -> bytes:
    """The first minutes of each, below each other, as a PNG in the colours of a light page."""
    figure = Figure(figsize=(9.0, 6.2), layout="constrained")
    axes = figure.subplots(len(runs), 1, sharex=True)
    for place, (words, run) in zip(axes, runs.items(), strict=True):
        draw_places(place, run, 0.0, SHOWN_S, 700)
        batches = [batch.time_s for batch in run.batches if batch.time_s <= SHOWN_S]
        for at in batches:
            place.axvline(at, color=Ink.TEXT.hex, linewidth=0.9)
        dress(place, f"{words}: {len(batches)} batches", "seconds" if place is axes[-1] else "", "places")
    legend(axes[-1], 6)
    for artist in figure.findobj():
        _light(artist)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=90, metadata={"Software": None})
    return out.getvalue()


def _light(artist: object) -> None:
    """The colour that a light page has for each ink."""
    from matplotlib.colors import to_hex

    inks = {ink.hex: ink.value[1] for ink in Ink}
    for what in ("color", "facecolor", "edgecolor"):
        get, change = getattr(artist, f"get_{what}", None), getattr(artist, f"set_{what}", None)
        if get is None or change is None:
            continue
        try:
            change(inks.get(to_hex(get()), get()))
        except (TypeError, ValueError):  # several colours, or none
            continue


def main() -> None:
    """See above."""
    runs = {words: record(OUT / f"{mode}.jsonl", mode) for mode, words in MODES.items()}
    (OUT / "report.html").write_text(page(list(runs.values())), encoding="utf-8")
    PICTURE.write_bytes(draw(runs))
    print(f"wrote {PICTURE} and {OUT / 'report.html'}")


if __name__ == "__main__":
    main()
