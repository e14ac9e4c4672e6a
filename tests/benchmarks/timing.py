"""Turns, ratios and tables: what the benchmarks share.

Machines are shared and their speed drifts, so a time by itself says little. What is compared takes
turns in one run, and is told as the median of the turns' ratios, with the quartiles for the noise.
Processor time (of all threads) leaves out what others on the machine took, but counts threads that
spin while they wait for each other: on a busy machine, trust that of one thread.
"""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Time(NamedTuple):
    """Seconds of a piece of work."""

    wall: float
    cpu: float
    """Of the process, all its threads added up."""


class Stopwatch:
    """Measures the body of a `with`; on a GPU, until its work is done."""

    def __enter__(self) -> "Stopwatch":
        _finish()
        self._started = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        _finish()
        now = time.perf_counter(), time.process_time()
        self.time = Time(now[0] - self._started[0], now[1] - self._started[1])


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(work: Callable[[], object], repeats: int = 1) -> Time:
    """Return the time of one of `repeats` calls."""
    with Stopwatch() as watch:
        for _ in range(repeats):
            work()
    return Time(watch.time.wall / repeats, watch.time.cpu / repeats)


def repeats_for(work: Callable[[], object], seconds: float) -> int:
    """Return how many calls of `work`, which is warm by then, fill `seconds`."""
    work()
    return max(1, round(seconds / max(timed(work).wall, 1e-9)))


def alternate(
    sides: Mapping[str, Callable[[int], Time]], turns: int, *, warmup: int = 1
) -> dict[str, list[Time]]:
    """Let the sides take turns, and return each one's times.

    A side is called with the number of the turn; those of the warm-up are negative, and not kept.
    Who begins changes from turn to turn, so that nobody always comes after the same one.
    """
    names = list(sides)
    times: dict[str, list[Time]] = {name: [] for name in names}
    for turn in range(-warmup, turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            taken = sides[name](turn)
            if turn >= 0:
                times[name].append(taken)
    return times


class Ratio(NamedTuple):
    """The median over turns, and the quartiles: half of the turns lie between them."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return self.digits(2)

    def digits(self, places: int) -> str:
        """Return it as text."""
        return f"{self.median:.{places}f} ({self.low:.{places}f}-{self.high:.{places}f})"


def ratio(of: Sequence[float], to: Sequence[float]) -> Ratio:
    """Return `of` / `to`, turn by turn."""
    values = [a / b for a, b in zip(of, to, strict=True)]
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return Ratio(statistics.median(values), low, high)


def wall(times: Sequence[Time]) -> list[float]:
    """Return the wall times."""
    return [time.wall for time in times]


def cpu(times: Sequence[Time]) -> list[float]:
    """Return the processor times."""
    return [time.cpu for time in times]


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a markdown table."""
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    print_rows(rows)


def print_rows(rows: Sequence[Sequence[object]]) -> None:
    """Print further rows of it."""
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")
    sys.stdout.flush()


def write_json(path: Path | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows with the machine and the command that gave them; nothing without a path."""
    if path is not None:
        told = {"command": sys.argv, "machine": machine(), "rows": list(rows)}
        path.write_text(json.dumps(told, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Return what the numbers depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def set_threads(threads: int | None) -> None:
    """Take so many threads, all cores by default, whatever the environment says."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
