"""A study to read: report.html (self-contained), report.md, and the tables on a terminal.

All numbers come from `launch.study`; here they become sentences, tables and figures. Figures are
SVG drawn by matplotlib, whose colours are replaced by the page's CSS variables, so that one
drawing serves light and dark screens.
"""

import io
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.study import Column, Reach, RunCurve, Sample, Stage, Study
from trainer.tracking import dashboard_command, flatten

# Stand-ins in the drawings for the page's colours: any hex values that are used nowhere else.
INK, MUTED, LINE, SHADE = "#010101", "#020202", "#030303", "#040404"
ARMS = tuple(f"#0500{number:02x}" for number in range(6))
PAGE_COLOURS = {INK: "ink", MUTED: "muted", LINE: "line", SHADE: "shade"} | {
    colour: f"arm{number}" for number, colour in enumerate(ARMS)
}
MARKERS = ("o", "s", "^", "D", "v", "P")
MAX_POINTS = 250  # of a training curve: each point is the mean of its share of the steps
NOT_AN_OPTION = ("run.name", "run.dir", "tracking.mlflow.parent_run_id")
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


def write_report(study: Study) -> Path:
    """Write report.html and report.md into the study's folder; returns the former's path."""
    study.folder.mkdir(parents=True, exist_ok=True)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=lambda name: name is not None and name.endswith(".html.jinja"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = markdown_cell
    content = describe(study)
    for name in ("report.md", "report.html"):
        text = environment.get_template(f"{name}.jinja").render(content)
        temporary = study.folder / f".{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, study.folder / name)
    return study.folder / "report.html"


def print_summary(console: Console, study: Study) -> None:
    """Print the headline and the tables."""
    console.print()
    for sentence in headline(study):
        console.print(Text(sentence, style="bold"))
    for note in study.notes:
        console.print(Text(f"Note: {note}", style="yellow"))
    for grid in (stage_grid(study), speed_grid(study)):
        table = Table(
            title=grid.title,
            title_justify="left",
            header_style="bold",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
            show_edge=False,
        )
        for number, full in enumerate(grid.header):  # short words: the table fits 80 columns
            name = full.replace("accuracy", "acc").replace("difference", "diff")
            table.add_column(Text(name), justify="left" if number == 0 else "right")
        for row in grid.rows:
            table.add_row(*map(Text, row))
        console.print(table)


@dataclass(frozen=True)
class Grid:
    """A table of texts; the first column names the row."""

    title: str
    header: list[str]
    rows: list[list[str]]


def describe(study: Study) -> dict[str, Any]:
    """Everything the templates show."""
    first = study.arms[study.treatment][0]
    uri = first.config.get("tracking", {}).get("mlflow", {}).get("uri")
    verdict, *details = headline(study)
    return {
        "title": " against ".join([study.treatment, study.baseline][: len(study.arms)]),
        "verdict": verdict,
        "details": details,
        "notes": study.notes,
        "arms": list(study.arms),
        "looks": {arm: (n % 6, MARKERS[n % 6]) for n, arm in enumerate(study.arms)},
        "is_comparison": study.is_comparison,
        "seeds": study.seeds,
        "is_marked": len(study.reached) == 1 and study.reached[0] is not None,
        "figures": figures(study),
        "stages": stage_grid(study),
        "speed": speed_grid(study),
        "differences": difference_grid(study),
        "configs": {arm: _yaml(runs[0].config) for arm, runs in study.arms.items()},
        "versions": version_grid(study),
        "dashboard": dashboard_command(str(uri)) if uri else None,
        "dashboard_is_command": bool(uri) and dashboard_command(str(uri)) != uri,
    }


# Sentences


def headline(study: Study) -> Iterator[str]:
    """The verdict in plain words, then what it rests on."""
    loss = study.final_loss
    treatment, baseline = study.treatment, study.baseline
    ours, theirs = loss[treatment], loss[baseline]
    if ours is None or theirs is None:
        yield "There is no held-out loss to compare yet."
        return
    if not study.is_comparison:
        yield f"{treatment}: final held-out loss {_spread(ours)} nats a target."
        return
    hits = [reach for reach in study.reached if reach]
    n = len(study.reached)
    if len(hits) == n:
        share = np.mean([hit.share for hit in hits])
        yield f"{treatment} reached {baseline}’s final loss after {share:.0%} of its steps."
    elif hits:
        yield f"{treatment} reached {baseline}’s final loss with {len(hits)} of {n} seeds."
    else:
        yield f"{treatment} did not reach {baseline}’s final loss."
    yield (
        f"Final held-out loss {_spread(ours)} against {_spread(theirs)} nats a target"
        + (f", mean ± standard deviation over {n} seeds." if n > 1 else ", with one seed.")
    )
    for hit, seed in zip(study.reached, study.seeds, strict=False):
        if hit:
            yield ("" if n == 1 else f"Seed {seed}: ") + reach_sentence(hit, treatment, baseline)


def reach_sentence(reach: Reach, treatment: str, baseline: str) -> str:
    """Steps and time of a reach, as numbers."""
    sentence = f"{treatment} needed {reach.step:,} of {reach.of_steps:,} steps"
    if math.isfinite(reach.seconds) and reach.of_seconds > 0:
        sentence += (
            f" and {_duration(reach.seconds)} of {baseline}’s {_duration(reach.of_seconds)}"
            f" of training ({reach.time_share:.0%})"
        )
    return sentence + "."


# Tables


def stage_grid(study: Study) -> Grid:
    """The per-stage table, in the form of the paper's table 4."""
    header = ["stage", "max length", "batch", "steps"]
    for arm in study.arms:
        whose = f"{arm} " if study.is_comparison else ""
        header += [f"{whose}loss", f"{whose}accuracy"]
    if study.is_comparison:
        header.append("loss difference")
    rows = []
    for row in study.table:
        stage = row.stage
        line = [stage.name, f"{stage.seq_len:,}", f"{stage.global_batch:,}", f"{stage.steps:,}"]
        for arm in study.arms:
            accuracy = row.accuracy[arm]
            line += [_spread(row.loss[arm]), f"{accuracy.mean:.1%}" if accuracy else "–"]
        if study.is_comparison:
            line.append(_spread(row.difference, "{:+.3f}"))
        rows.append(line)
    return Grid("Held-out loss and accuracy at the end of each stage", header, rows)


def speed_grid(study: Study) -> Grid:
    """Speed, memory and time by arm."""
    header = ["arm", "tokens/s", "MFU", "waiting for data", "peak memory, GiB", "training time"]
    rows = [
        [
            arm,
            _spread(speed.tokens_per_s, "{:,.0f}"),
            _spread(speed.mfu, "{:.1%}"),
            _spread(speed.data_wait, "{:.1%}"),
            _spread(speed.peak_gib, "{:.2f}"),
            _duration(speed.seconds.mean) if speed.seconds else "–",
        ]
        for arm, speed in study.speed.items()
    ]
    return Grid("Speed", header, rows)


def difference_grid(study: Study) -> Grid:
    """Options in which the arms differ, besides their names."""
    options = {arm: flatten(runs[0].config) for arm, runs in study.arms.items()}
    names = {name: None for leaves in options.values() for name in leaves}
    rows = [
        [name, *(leaves.get(name, "–") for leaves in options.values())]
        for name in names
        if name not in NOT_AN_OPTION and len({o.get(name) for o in options.values()}) > 1
    ]
    return Grid("Options in which the arms differ", ["option", *study.arms], rows)


def version_grid(study: Study) -> Grid:
    """Programs, data and machine by arm."""
    versions = {arm: flatten(runs[0].versions) for arm, runs in study.arms.items()}
    names = {name: None for leaves in versions.values() for name in leaves}
    rows = [[name, *(leaves.get(name, "–") for leaves in versions.values())] for name in names]
    return Grid("Versions and fingerprints", ["", *study.arms], rows)


def markdown_cell(text: str) -> str:
    """Text that cannot end a Markdown table's cell or start markup."""
    return re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", " ".join(str(text).split()))


def _spread(sample: Sample | None, form: str = "{:.3f}") -> str:
    if sample is None:
        return "–"
    mean = form.format(sample.mean).replace("-", "−")
    return mean if sample.n == 1 else f"{mean} ± {form.replace('+', '').format(sample.std)}"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def _yaml(config: dict[str, Any]) -> str:
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=88)


# Figures


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
