"""`roformer compare`: the same run for each arm and seed, paired in all but what an arm sets.

Arms see the same rows in the same order with the same masks, and start from the same weights
wherever the shapes allow. A run that is finished is not trained again, so a study that was stopped
goes on where it was.
"""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from configs.loader import ConfigError, load
from configs.schema import Config
from launch.errors import EXIT_OK
from launch.preflight import local_processes, prepare
from launch.report import print_summary, write_report
from launch.run_folder import STUDY, folder_of, is_done, write_text
from launch.spawn import spawn
from launch.study import load_study
from trainer.config import MlflowConfig
from trainer.tracking import Status, finish_parent, start_parent, sync


@dataclass(frozen=True)
class ArmRun:
    """One training run of a study."""

    arm: str
    overrides: tuple[str, ...]
    config: Config


def compare(path: Path, overrides: Sequence[str], console: Console) -> int:
    """Train every arm with every seed, then write and show the report."""
    config = load(path, overrides)
    folder = folder_of(config)
    runs = list(plan_runs(config, path, overrides))
    check(folder, runs)
    folder.mkdir(parents=True, exist_ok=True)
    write_study(folder, config, runs)
    mlflow = config.tracking.mlflow
    parent = start_parent(folder, mlflow)
    status: Status = "FAILED"
    try:
        for number, run in enumerate(runs, 1):
            title = f"{run.arm}, seed {run.config.run.seed} (run {number} of {len(runs)})"
            if is_done(run.config):
                console.print(
                    f"{title}: finished before; remove {folder_of(run.config)} to redo it"
                )
                continue
            console.rule(title)
            extra = (f"tracking.mlflow.parent_run_id={parent}",) if parent else ()
            code = spawn(
                run.config,
                path,
                (*run.overrides, *extra),
                processes=local_processes(run.config),
            )
            if code != EXIT_OK:
                status = "KILLED"
                return code
        show_report([folder], console)
        status = "FINISHED"
    finally:
        if parent is not None and (missed := finish_parent(folder, mlflow, status)) is not None:
            console.print(missed, style="yellow")
    show_dashboard(folder, mlflow, console)
    return EXIT_OK


def plan_runs(config: Config, path: Path, overrides: Sequence[str]) -> Iterator[ArmRun]:
    """Yield the runs of a study: seed by seed, so that a stopped study has whole pairs."""
    seeds = config.compare.seeds or [config.run.seed]
    for seed in seeds:
        for arm, changes in config.compare.arms.items():
            name = arm if len(seeds) == 1 else f"{arm}-seed{seed}"
            place = [f"run.dir={folder_of(config)}", f"run.name={name}", f"run.seed={seed}"]
            if config.tracking.mlflow.uri is not None:  # one store for all, where the study's is
                place.append(f"tracking.mlflow.uri={config.tracking.mlflow.uri}")
            full = (*overrides, *changes, *place)
            try:
                yield ArmRun(arm, full, load(path, full))
            except ConfigError as error:
                raise ConfigError([f"arm {arm}: {p}" for p in error.problems]) from None


def check(
    folder: Path, runs: Sequence[ArmRun], *, world: int | None = None, here: bool = True
) -> None:
    """Find everything that would stop any of the runs, before the first of them starts.

    Without `here` they are meant for other machines, and `world` is the number of their ranks.
    """
    problems: list[str] = []
    if (folder / "config.yaml").exists():
        problems.append(f"{folder} is a run of `roformer train`; choose another run.name")
    for run in runs:
        try:
            prepare(run.config, world or local_processes(run.config), here=here)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def write_study(folder: Path, config: Config, runs: Sequence[ArmRun]) -> None:
    """Write which runs make the study."""
    names = {
        arm: [run.config.run.name for run in runs if run.arm == arm] for arm in config.compare.arms
    }
    seeds = config.compare.seeds or [config.run.seed]
    study = {"arms": list(config.compare.arms), "seeds": seeds, "runs": names}
    write_text(folder / STUDY, json.dumps(study, indent=1))


def report(folders: Sequence[Path], console: Console) -> int:
    """Write and show the report of finished runs or of a study; deliver what MLflow lacks."""
    show_report(folders, console)
    return EXIT_OK


def show_report(folders: Sequence[Path], console: Console) -> None:
    """Write report.html and report.md, print the tables, and bring MLflow up to date."""
    study = load_study(folders)
    page = write_report(study)
    print_summary(console, study)
    console.print(f"\nreport     {page}")
    for run in (run for runs in study.arms.values() for run in runs):
        if (missed := sync(run.folder)) is not None:
            console.print(missed, style="yellow")


def show_dashboard(folder: Path, mlflow: MlflowConfig, console: Console) -> None:
    """Say how to see the curves in MLflow."""
    if mlflow.uri is not None:
        console.print(f"MLflow     roformer dashboard {shlex.quote(str(folder))}")
