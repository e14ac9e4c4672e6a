"""Runs commands as a user does, in processes of their own."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def roformer(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `roformer` to its end; its stdout and stderr come together."""
    return subprocess.run(
        [sys.executable, "-m", "launch.cli", *map(str, arguments)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        check=False,
    )


def read_records(folder: Path) -> list[dict]:
    """Return the records of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
