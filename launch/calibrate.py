"""`roformer plan --calibrate`: a few steps of each stage on this machine, timed."""

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from configs.loader import load
from configs.schema import Config
from launch.errors import Failed
from launch.plan import StagePlan
from launch.preflight import local_processes, prepare
from launch.run_folder import folder_of
from launch.spawn import spawn

STEPS = 4
"""Of each stage; the first of a stage is left out."""


def calibrate(
    path: Path, overrides: Sequence[str], config: Config, console: Console
) -> Callable[[StagePlan], float]:
    """Train a few steps of each stage in a folder that is taken away again; return their times.

    Raises:
        ConfigError: If the config cannot be trained here.
    """
    ranks = local_processes(config)
    with tempfile.TemporaryDirectory(prefix="roformer-calibrate-") as folder:
        short = [
            f"run.dir={folder}",
            *(f"curriculum.stages.{n}.steps={STEPS}" for n in range(len(config.curriculum.stages))),
            *("schedule.kind=constant", "schedule.warmup=0", "schedule.decay=null"),
            *("schedule.total=null", "checkpoint.every_steps=0", "data.eval=null"),
            *("tracking.every_steps=1", "tracking.mlflow.uri=null", "launch.nodes=1"),
        ]
        words = (*overrides, *short)
        shortened = load(path, words)
        prepare(shortened, ranks)
        console.print(f"calibrating: {STEPS} steps of each stage on {ranks} ranks here")
        if spawn(shortened, path, words, processes=ranks) != 0:
            raise Failed("the calibration was stopped")
        lines = (folder_of(shortened) / "metrics.jsonl").read_text().splitlines()
    seconds: dict[str, list[float]] = {}
    peak: dict[str, float] = {}
    for record in map(json.loads, lines):
        step_tokens = record["seq_len"] * record["global_batch"]
        seconds.setdefault(record["stage"], []).append(step_tokens / record["perf/tokens_per_s"])
        peak[record["stage"]] = record["memory/peak_gib"]
    medians = {stage: statistics.median(times[1:]) for stage, times in seconds.items()}
    for stage, time in medians.items():
        console.print(f"  {stage}: {time:.3f} s a step, peak memory {peak[stage]:.2f} GiB")
    return lambda row: medians[row.stage.name]
