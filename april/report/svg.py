"""Figures of matplotlib as SVG whose colours are the page's: one picture for a light and a dark page, no script.

matplotlib gets a colour of each :class:`Ink`, which nothing else has, and the page's CSS says what it looks like.
"""

from __future__ import annotations

import io
import re
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


class Ink(Enum):
    """What things are drawn with: (placeholder, on a light page, on a dark one)."""

    TEXT = ("#010100", "#1f2328", "#e6e8eb")
    FAINT = ("#010200", "#d5d9de", "#3a4048")
    SOFT = ("#010300", "#6a737d", "#9aa4af")
    AGE0 = ("#020100", "#2f7fb8", "#4fa3dd")
    AGE1 = ("#020200", "#f2b544", "#f2b544")
    AGE2 = ("#020300", "#e07b39", "#ea8a4a")
    AGE3 = ("#020400", "#c1402f", "#dd5a48")
    AGE4 = ("#020500", "#7d1f4b", "#b0477a")
    EVALUATION = ("#020600", "#8a8fd1", "#9aa0e8")
    EMPTY = ("#020700", "#eceff2", "#262b31")
    CAUSE0 = ("#030100", "#9aa4af", "#77818c")
    CAUSE1 = ("#030200", "#c58bb8", "#b57aa8")
    CAUSE2 = ("#030300", "#7fb7a5", "#6aa592")
    CAUSE3 = ("#030400", "#d9c37a", "#bfa95f")
    CAUSE4 = ("#030500", "#8f9fd9", "#7d8dca")
    CAUSE5 = ("#030600", "#d98f7a", "#c97c66")
    CAUSE6 = ("#030700", "#6f7f99", "#5f6f89")
    CAUSE7 = ("#030800", "#b5c97a", "#9bb05f")
    CAUSE8 = ("#030900", "#a98f6f", "#937a5c")
    CAUSE9 = ("#031000", "#7ab8d9", "#5fa0c4")

    @property
    def hex(self) -> str:
        """For matplotlib."""
        return self.value[0]

    @property
    def variable(self) -> str:
        """Of CSS."""
        return f"--{self.name.lower().replace('_', '-')}"


AGES = (Ink.AGE0, Ink.AGE1, Ink.AGE2, Ink.AGE3, Ink.AGE4)
CAUSES = (
    Ink.CAUSE0, Ink.CAUSE1, Ink.CAUSE2, Ink.CAUSE3, Ink.CAUSE4, Ink.CAUSE5, Ink.CAUSE6, Ink.CAUSE7,
    Ink.CAUSE8, Ink.CAUSE9,
)  # fmt: skip
BELOW_AXES = -0.42
"""Inches: the numbers and the words of an axis."""
_HEX = re.compile("|".join(ink.hex for ink in Ink))
_BY_HEX = {ink.hex: f"var({ink.variable})" for ink in Ink}


def css() -> str:
    """The colours of both kinds of page."""
    light = "".join(f"{ink.variable}:{ink.value[1]};" for ink in Ink)
    dark = "".join(f"{ink.variable}:{ink.value[2]};" for ink in Ink)
    return f":root{{{light}}}\n@media (prefers-color-scheme: dark){{:root{{{dark}}}}}"


def new_figure(width: float, height: float) -> Figure:
    """Of so many inches, without a background."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context():
        figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_visible(False)
    return figure


def dress(axes: Axes, title: str = "", x: str = "", y: str = "") -> None:
    """Words and lines in the page's colours."""
    axes.patch.set_visible(False)
    axes.set_title(title, loc="left", fontsize=10, color=Ink.TEXT.hex)
    axes.set_xlabel(x, fontsize=9, color=Ink.SOFT.hex)
    axes.set_ylabel(y, fontsize=9, color=Ink.SOFT.hex)
    axes.tick_params(which="both", labelsize=8, color=Ink.FAINT.hex, labelcolor=Ink.SOFT.hex)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(Ink.FAINT.hex)


def whole_numbers(axis: Axis) -> None:
    """No ticks between those of what is counted."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins="auto", integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def legend(axes: Axes, columns: int) -> None:
    """Below the picture."""
    handles, _ = axes.get_legend_handles_labels()
    from matplotlib.transforms import ScaledTranslation

    figure = axes.get_figure()
    assert figure is not None
    below = axes.transAxes + ScaledTranslation(0.0, BELOW_AXES, figure.dpi_scale_trans)
    axes.legend(
        handles=handles, ncols=columns, loc="upper left", bbox_to_anchor=(0.0, 0.0), bbox_transform=below,
        borderaxespad=0.0, fontsize=8, frameon=False, labelcolor=Ink.TEXT.hex, handlelength=1.1, columnspacing=1.2,
    )  # fmt: skip


def svg_of(figure: Figure, name: str, what: str) -> str:
    """An ``<svg>`` element; ``name`` keeps its ids apart from others, ``what`` is for who cannot see it."""
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    text = _HEX.sub(lambda found: _BY_HEX[found[0]], text)
    head, _, rest = text.partition(">")
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None
    return f'<svg {box[0]} role="img" aria-label="{what}">{rest}'
