"""The report's figures: SVG drawn by matplotlib, with the page's CSS variables for colours.

One drawing serves light and dark screens: it is made in stand-in colours, which are replaced.
"""

import io
import math
import re
import warnings
from collections.abc import Callable
from itertools import cycle
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from launch.study import Column, RunCurve, Stage, Study

# Stand-ins in the drawings for the page's colours: any hex values that are used nowhere else.
INK, MUTED, LINE, SHADE = "#010101", "#020202", "#030303", "#040404"
ARMS = tuple(f"#0500{number:02x}" for number in range(6))
PAGE_COLOURS = {INK: "ink", MUTED: "muted", LINE: "line", SHADE: "shade"} | {
    colour: f"arm{number}" for number, colour in enumerate(ARMS)
}
MARKERS = ("o", "s", "^", "D", "v", "P")
MAX_POINTS = 250  # of a training curve: each point is the mean of its share of the steps
STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


def figures(study: Study) -> dict[str, str]:
    """SVG texts by name; the main one also in a narrow form, for phones."""
    longest = max(run["elapsed_s"][-1] for runs in study.arms.values() for run in runs)
    unit, seconds = ("hours", 3600) if longest > 3 * 3600 else ("minutes", 60)
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # texts stay texts, so the reader's fonts draw what matplotlib's lacks
        warnings.filterwarnings("ignore", r"Glyph .* missing from font")
        return {
            "steps": _svg(draw_steps(study, (11.6, 5.9)), "steps"),
            "steps_narrow": _svg(draw_steps(study, (4.4, 5.2)), "narrow"),
            "tokens": _svg(draw_against(study, "tokens", 1.0, "tokens"), "tokens"),
            "time": _svg(
                draw_against(study, "elapsed_s", 1 / seconds, f"{unit} of training"), "time"
            ),
        }


def draw_steps(study: Study, size: tuple[float, float]) -> Figure:
    """Loss over steps; beneath it, on the same axis, learning rate and length x batch."""
    figure = Figure(size, layout="constrained")
    loss, rate, length = figure.subplots(3, 1, sharex=True, height_ratios=(6, 1, 1))
    wide = size[0] > 6
    run = study.arms[study.treatment][0]
    edge = 0
    for number, stage in enumerate(run.stages):
        for axes in (loss, rate, length):
            if number % 2 == 0:
                axes.axvspan(edge, edge + stage.steps, color=SHADE, lw=0, zorder=0)
        label = f"{stage.name}\n{stage.seq_len:,} × {stage.global_batch:,}" if wide else stage.name
        letters = max(map(len, label.split("\n")))
        fits = stage.steps / run.total_steps * size[0] > 0.09 * letters  # inches
        loss.annotate(
            label if fits else "",
            (edge + stage.steps / 2, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            va="bottom",
            color=MUTED,
            fontsize=9,
        )
        edge += stage.steps
    draw_loss(loss, study, "step", 1.0)
    mark_reach(loss, study)
    rate.plot(run["step"], run["lr"], color=MUTED, lw=1.5)
    peak = float(np.nanmax(run["lr"], initial=0.0))
    rate.set_yticks([0, peak], ["0", f"{peak:.1e}".replace(".0e", "e")])
    rate.set_ylim(0, None)
    rate.set_ylabel("lr")
    length.step(*_stairs(run.stages, lambda s: s.seq_len), color=MUTED, lw=1.5, where="post")
    length.set_yticks([0, max(stage.seq_len for stage in run.stages)])
    length.set_ylim(0, None)
    length.set_ylabel("length")
    length.set_xlabel("steps")
    length.set_xlim(0, edge)
    for axes in (rate, length):
        axes.grid(False)
    length.xaxis.set_major_formatter(FuncFormatter(short_number))
    figure.align_ylabels()
    return figure


def draw_against(study: Study, metric: str, scale: float, label: str) -> Figure:
    """Loss over tokens or time; dotted lines mark the stages' ends of each arm."""
    figure = Figure((5.4, 3.6), layout="constrained")
    axes = figure.subplots()
    draw_loss(axes, study, metric, scale)
    for colour, runs in zip(cycle(ARMS), study.arms.values(), strict=False):
        run = runs[0]
        for i in range(1, len(run.stage_names)):
            if run.stage_names[i] != run.stage_names[i - 1]:
                axes.axvline(run[metric][i - 1] * scale, color=colour, lw=0.8, ls=":")
    axes.set_xlim(0, None)
    axes.set_xlabel(label)
    axes.xaxis.set_major_formatter(FuncFormatter(short_number))
    return figure


def draw_loss(axes: Axes, study: Study, metric: str, scale: float) -> None:
    """Training loss (thin) and held-out loss (marked) of every run over a metric."""
    looks = cycle(zip(ARMS, MARKERS, strict=True))
    for (colour, marker), runs in zip(looks, study.arms.values(), strict=False):
        for run in runs:
            x = run[metric] * scale
            axes.plot(*binned(x, run["train/loss"]), color=colour, lw=1, alpha=0.45)
            for part in _same_length(run):
                axes.plot(
                    x[part],
                    run["eval/loss"][part],
                    color=colour,
                    lw=2,
                    marker=marker,
                    ms=4.5,
                    markevery=max(1, len(run.evaluated) // 40),
                )
    axes.set_ylabel("loss, nats")
    axes.set_ylim(*loss_limits(study))


def mark_reach(axes: Axes, study: Study) -> None:
    """Show where the treatment reached its baseline's final loss, in a study of one seed."""
    reach = study.reached[0] if len(study.reached) == 1 else None
    if reach is None:
        return
    _, baseline = study.pairs[0]
    level = float(baseline["eval/loss"][baseline.evaluated[-1]])
    axes.plot([0, reach.of_steps], [level, level], color=INK, lw=1, ls="--")
    axes.plot([reach.step, reach.step], [axes.get_ylim()[0], level], color=INK, lw=1, ls="--")
    axes.annotate(
        f"step {reach.step:,} ({reach.share:.0%})",
        (reach.step, axes.get_ylim()[0]),
        xytext=(5, 6) if reach.share < 0.75 else (-5, 6),
        textcoords="offset points",
        ha="left" if reach.share < 0.75 else "right",
    )


def loss_limits(study: Study) -> tuple[float, float]:
    """Range of the losses after the first 5% of the steps, so that the start hides nothing."""
    low, high = math.inf, -math.inf
    for run in (run for runs in study.arms.values() for run in runs):
        late = run["step"] > 0.05 * run.total_steps
        seen = np.concatenate([run["train/loss"][late], run["eval/loss"][late]])
        seen = seen[np.isfinite(seen)]
        if len(seen):
            low, high = min(low, seen.min()), max(high, seen.max())
    if low > high:
        return 0.0, 1.0
    margin = 0.04 * (high - low) or 0.5
    return low - 2 * margin, high + margin


def binned(x: Column, y: Column) -> tuple[Column, Column]:
    """At most MAX_POINTS means of neighbouring finite points."""
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if not len(x):
        return x, y
    edges = np.unique(np.linspace(0, len(x), min(MAX_POINTS, len(x)) + 1).astype(int))[:-1]
    counts = np.diff(np.append(edges, len(x)))
    return np.add.reduceat(x, edges) / counts, np.add.reduceat(y, edges) / counts


def short_number(value: float, _position: object = None) -> str:
    """1500000 -> 1.5M, for an axis."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):g}{unit}"
    return f"{value:,g}"


def _same_length(run: RunCurve) -> list[Any]:
    """The evaluated steps, cut where the evaluation's length changes and losses jump."""
    lengths = np.nan_to_num(run["eval/seq_len"][run.evaluated])
    return np.split(run.evaluated, np.flatnonzero(np.diff(lengths)) + 1)


def _stairs(stages: list[Stage], value: Callable[[Stage], int]) -> tuple[list[int], list[int]]:
    edges = [0, *np.cumsum([stage.steps for stage in stages]).tolist()]
    values = [value(stage) for stage in stages]
    return edges, [*values, values[-1]]


def _svg(figure: Figure, name: str) -> str:
    """A drawing to put into a page: no header, ids of its own, the page's colours and fonts."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        FigureCanvasSVG(figure).print_svg(buffer)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r"#0[0-5]0[0-9a-f]0[0-9a-f]\b", lambda m: f"var(--{PAGE_COLOURS[m[0]]})", text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    return text.replace("<svg ", '<svg role="img" aria-label="Curves of the loss" ', 1)
