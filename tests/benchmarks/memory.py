"""Resident memory of every process of a run, second by second: flat, or does it grow?

    python -m tests.benchmarks.memory CONFIG.yaml [key=value ...]

Trains by `roformer train`, and prints for each process that lived through half of it the memory
after a quarter of the run, at its end, and the slope of the line through what lies between, with
its standard error. A loader process lives for a stage, so it is measured within that.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> int:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    command = [sys.executable, "-m", "launch.cli", "train", str(arguments.config)]
    run = subprocess.Popen([*command, *arguments.overrides], stderr=subprocess.DEVNULL)
    samples: dict[str, list[tuple[float, float]]] = {}
    began = time.monotonic()
    while run.poll() is None:
        for process in descendants(run.pid):
            try:
                pages = int((process / "statm").read_text().split()[1])
                name = f"{process.name} {title(process)}"
            except (OSError, IndexError):
                continue
            samples.setdefault(name, []).append((time.monotonic() - began, pages * PAGE_MIB))
        time.sleep(0.5)
    took = time.monotonic() - began
    print(f"exit {run.returncode} after {took:.0f} s")
    for name, values in samples.items():
        late = np.array(values[len(values) // 4 :])
        if len(late) < 20:
            continue
        (slope, _), covariance = np.polyfit(late[:, 0], late[:, 1], 1, cov=True)
        print(
            f"{name:40} {late[0, 1]:8.1f} MiB -> {late[-1, 1]:8.1f} MiB over "
            f"{late[-1, 0] - late[0, 0]:5.0f} s: {60 * slope:+.2f} +- "
            f"{60 * covariance[0, 0] ** 0.5:.2f} MiB a minute"
        )
    return int(run.returncode)


def descendants(pid: int) -> list[Path]:
    """A process, and all that stem from it."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(status.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return [Path("/proc") / str(one) for one in found]


def title(process: Path) -> str:
    """Which of the run's processes it is."""
    words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    module = words[words.index("-m") + 1] if "-m" in words else words[0]
    variables = (process / "environ").read_bytes().split(b"\0")
    ranks = [v.partition(b"=")[2].decode() for v in variables if v.startswith(b"RANK=")]
    return f"{module} {'rank ' + ranks[0] if ranks else ''}"


if __name__ == "__main__":
    sys.exit(main())
