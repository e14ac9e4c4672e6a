"""A study to read: report.html (self-contained), report.md, and the tables on a terminal.

All numbers come from `launch.study`, the figures from `launch.figures`; here they become sentences
and tables.
"""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import yaml
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.figures import MARKERS, figures
from launch.study import Reach, Sample, Study
from trainer.tracking import dashboard_command, flatten

NOT_AN_OPTION = ("run.name", "run.dir", "tracking.mlflow.parent_run_id")


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
