"""Numbers of a study: runs read from their folders, compared arm by arm and stage by stage.

A study's arms are trained on the same rows, masks and initial weights, seed by seed, so arms are
compared within each seed and only then averaged. The first arm is the treatment (rotary positions),
the last one the baseline (absolute positions). The per-stage table has the form of table 4 of the
paper; losses are in nats a target.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import yaml
from numpy.typing import NDArray

Column = NDArray[np.float64]


@dataclass(frozen=True)
class Stage:
    """One stage of the curriculum, as configured."""

    name: str
    seq_len: int
    global_batch: int
    steps: int


@dataclass(frozen=True)
class RunCurve:
    """One run: its configuration and its logged steps as columns."""

    folder: Path
    config: dict[str, Any]
    versions: dict[str, Any]
    stages: list[Stage]
    """The configured curriculum."""
    columns: dict[str, Column]
    """Number of each logged step by metric; NaN where it is missing or was not finite."""
    stage_names: tuple[str, ...]
    """Stage of each logged step."""
    finished: bool

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def total_steps(self) -> int:
        """Steps of the configured curriculum."""
        return sum(stage.steps for stage in self.stages)

    def __getitem__(self, metric: str) -> Column:
        """Column of a metric; all NaN when it was never logged."""
        return self.columns.get(metric, np.full(len(self.stage_names), np.nan))

    @cached_property
    def evaluated(self) -> NDArray[np.intp]:
        """Indices of the logged steps that have a held-out loss."""
        return np.flatnonzero(np.isfinite(self["eval/loss"]))

    def last_evaluation(self, stage: str) -> int | None:
        """Index of the stage's last evaluated step."""
        inside = [i for i in self.evaluated if self.stage_names[i] == stage]
        return int(inside[-1]) if inside else None


@dataclass(frozen=True)
class Sample:
    """Mean and sample standard deviation over seeds."""

    n: int
    mean: float
    std: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self | None:
        """Statistics of the finite values; None without any; std is NaN for a single one."""
        finite = [v for v in values if np.isfinite(v)]
        if not finite:
            return None
        std = float(np.std(finite, ddof=1)) if len(finite) > 1 else float("nan")
        return cls(len(finite), float(np.mean(finite)), std)


@dataclass(frozen=True)
class Reach:
    """Where the treatment's held-out loss reached the baseline's final one."""

    step: int
    of_steps: int
    tokens: float
    seconds: float
    of_seconds: float

    @property
    def share(self) -> float:
        """Share of the baseline's steps."""
        return self.step / self.of_steps

    @property
    def time_share(self) -> float:
        """Share of the baseline's training time."""
        return self.seconds / self.of_seconds


@dataclass(frozen=True)
class StageRow:
    """A line of the per-stage table: values at the stage's last evaluation, by arm."""

    stage: Stage
    loss: dict[str, Sample | None]
    accuracy: dict[str, Sample | None]
    difference: Sample | None
    """Held-out loss, treatment minus baseline, seed by seed."""


@dataclass(frozen=True)
class Speed:
    """How fast an arm trained; medians over the logged steps after the first of each stage."""

    tokens_per_s: Sample | None
    mfu: Sample | None
    data_wait: Sample | None
    """Share of a step spent waiting for data."""
    peak_gib: Sample | None
    seconds: Sample | None
    """Training time."""


@dataclass(frozen=True)
class Study:
    """Arms, each with one run a seed (in the same order for every arm)."""

    folder: Path
    """Where the report belongs."""
    arms: dict[str, list[RunCurve]]
    seeds: list[int]

    @property
    def treatment(self) -> str:
        """The first arm."""
        return next(iter(self.arms))

    @property
    def baseline(self) -> str:
        """The last arm; the treatment itself in a study of one run."""
        return list(self.arms)[-1]

    @property
    def is_comparison(self) -> bool:
        """Whether there is more than one arm."""
        return len(self.arms) > 1

    @property
    def pairs(self) -> list[tuple[RunCurve, RunCurve]]:
        """(treatment, baseline) of each seed."""
        return list(zip(self.arms[self.treatment], self.arms[self.baseline], strict=False))

    @cached_property
    def reached(self) -> list[Reach | None]:
        """Where each seed's treatment reached its baseline's final loss."""
        return [steps_to_reach(*pair) for pair in self.pairs] if self.is_comparison else []

    @cached_property
    def final_loss(self) -> dict[str, Sample | None]:
        """Held-out loss at each arm's last evaluation."""
        return {arm: Sample.of(map(final_loss, runs)) for arm, runs in self.arms.items()}

    @cached_property
    def table(self) -> list[StageRow]:
        """The paper's table 4: one row a stage."""
        return [self._row(stage) for stage in self.arms[self.treatment][0].stages]

    def _row(self, stage: Stage) -> StageRow:
        def value(run: RunCurve, metric: str) -> float:
            index = run.last_evaluation(stage.name)
            return float("nan") if index is None else float(run[metric][index])

        def samples(metric: str) -> dict[str, Sample | None]:
            return {a: Sample.of(value(r, metric) for r in runs) for a, runs in self.arms.items()}

        differences = (value(t, "eval/loss") - value(b, "eval/loss") for t, b in self.pairs)
        difference = Sample.of(differences) if self.is_comparison else None
        return StageRow(stage, samples("eval/loss"), samples("eval/accuracy"), difference)

    @cached_property
    def speed(self) -> dict[str, Speed]:
        """Speed by arm."""
        return {arm: measure_speed(runs) for arm, runs in self.arms.items()}

    @cached_property
    def notes(self) -> list[str]:
        """What makes the comparison less than complete or fair, a sentence each."""
        runs = [run for arm in self.arms.values() for run in arm]
        found = [
            f"{run.name} is not finished: its last step is {int(run['step'][-1])} "
            f"of {run.total_steps}."
            for run in runs
            if not run.finished
        ]
        without = [run.name for run in runs if not len(run.evaluated)]
        if without:
            found.append(f"No held-out loss in {', '.join(without)}.")
        if any(run.stages != runs[0].stages for run in runs):
            found.append(
                "The runs' curricula differ: the stages shown are those of " + runs[0].name + "."
            )
        fingerprints = {json.dumps(run.versions.get("data"), sort_keys=True) for run in runs}
        if len(fingerprints) > 1:
            found.append("The runs read different data: their losses are not comparable.")
        return found


def load_run(folder: Path) -> RunCurve:
    """Read a run's folder; ValueError in one line when there is no run to read."""
    config = _read_mapping(folder / "config.yaml", yaml.safe_load)
    versions = _read_mapping(folder / "versions.json", json.loads)
    records = _read_records(folder / "metrics.jsonl")
    try:
        curriculum = [
            Stage(str(s["name"]), int(s["seq_len"]), int(s["global_batch"]), int(s["steps"]))
            for s in config["curriculum"]["stages"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder / 'config.yaml'}: no curriculum.stages as a run's folder has it ({error!r})"
        ) from None
    names = {name: None for record in records for name in record}  # in order, each once
    columns = {name: np.array([_number(record.get(name)) for record in records]) for name in names}
    stages = tuple(str(record.get("stage", "")) for record in records)
    finished = (folder / "done").exists()
    return RunCurve(folder, config, versions, curriculum, columns, stages, finished)


def load_study(folders: Sequence[Path]) -> Study:
    """Read a study's folder, or any runs as arms named by their folders."""
    if len(folders) == 1 and (folders[0] / "study.json").exists():
        folder = folders[0]
        plan = _read_mapping(folder / "study.json", json.loads)
        try:
            arms = {
                arm: [load_run(folder / name) for name in plan["runs"][arm]] for arm in plan["arms"]
            }
            seeds = [int(seed) for seed in plan["seeds"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{folder / 'study.json'}: not a study's plan ({error!r})") from None
        if not arms or not all(arms.values()):
            raise ValueError(f"{folder / 'study.json'}: an arm has no runs")
        return Study(folder, arms, seeds)
    names = [folder.resolve().name for folder in folders]
    if not folders or len(set(names)) < len(names):
        raise ValueError(f"report: give one or more folders of different names, not {names}")
    arms = {name: [load_run(folder)] for name, folder in zip(names, folders, strict=True)}
    seeds = [int(runs[0].config.get("run", {}).get("seed", 0)) for runs in arms.values()]
    home = folders[0] if len(folders) == 1 else folders[0].resolve().parent / "-vs-".join(names)
    return Study(home, arms, seeds[:1])


def final_loss(run: RunCurve) -> float:
    """Held-out loss at the last evaluation; NaN without one."""
    return float(run["eval/loss"][run.evaluated[-1]]) if len(run.evaluated) else float("nan")


def steps_to_reach(treatment: RunCurve, baseline: RunCurve) -> Reach | None:
    """First evaluated step at which the treatment is at or below the baseline's final loss.

    Only evaluations at the length of the baseline's final one count, since the loss depends on it.
    """
    if not len(baseline.evaluated):
        return None
    last = baseline.evaluated[-1]
    at = treatment.evaluated
    length = baseline["eval/seq_len"][last]
    lengths = treatment["eval/seq_len"][at]
    comparable = (lengths == length) | (np.isnan(lengths) & np.isnan(length))
    hits = at[comparable & (treatment["eval/loss"][at] <= baseline["eval/loss"][last])]
    if not len(hits):
        return None
    return Reach(
        step=int(treatment["step"][hits[0]]),
        of_steps=int(baseline["step"][last]),
        tokens=float(treatment["tokens"][hits[0]]),
        seconds=float(treatment["elapsed_s"][hits[0]]),
        of_seconds=float(baseline["elapsed_s"][last]),
    )


def measure_speed(runs: Sequence[RunCurve]) -> Speed:
    """Medians of each run's steady steps, then the sample over runs."""

    def median(metric: Callable[[RunCurve], Column]) -> Sample | None:
        return Sample.of(_median(metric(run)[_steady(run)]) for run in runs)

    def data_wait(run: RunCurve) -> Column:
        # a record's wait is the sum over its steps, those since the record before it
        tokens = np.diff(run["step"], prepend=0) * run["global_batch"] * run["seq_len"]
        return run["perf/data_wait_s"] * run["perf/tokens_per_s"] / tokens

    return Speed(
        tokens_per_s=median(lambda run: run["perf/tokens_per_s"]),
        mfu=median(lambda run: run["perf/mfu"]),
        data_wait=median(data_wait),
        peak_gib=Sample.of(_largest(run["memory/peak_gib"]) for run in runs),
        seconds=Sample.of(float(run["elapsed_s"][-1]) for run in runs),
    )


def _steady(run: RunCurve) -> NDArray[np.bool_]:
    """Logged steps but the first of each stage, which pays for warming up."""
    first = np.array([i == 0 or s != run.stage_names[i - 1] for i, s in enumerate(run.stage_names)])
    return first if first.all() else ~first


def _median(values: Column) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else float("nan")


def _largest(values: Column) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.max()) if len(finite) else float("nan")


def _number(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else float("nan")  # type: ignore[arg-type]


def _read_mapping(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    if not path.exists():
        raise ValueError(f"{path}: missing; is this a run's folder?")
    try:
        content = parse(path.read_text())
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a mapping")
    return content


def _read_records(path: Path) -> list[dict[str, Any]]:
    """The last object of each step, by step; lines that a kill has torn are left out."""
    if not path.exists():
        raise ValueError(f"{path}: missing; the run has not logged a step yet")
    by_step: dict[int, dict[str, Any]] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
                by_step[int(record["step"])] = record
            except (ValueError, KeyError, TypeError):
                continue
    if not by_step:
        raise ValueError(f"{path}: no logged step; the run has not got that far")
    return [by_step[step] for step in sorted(by_step)]
