"""`roformer dashboard`: MLflow's pages on the store of some runs, and where their curves are.

The server starts without MLflow's job runners, which take gigabytes, and answers to the names that
it was told: MLflow refuses all others, or a page elsewhere could read it through one's browser.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from urllib.parse import quote

from rich.console import Console

from launch.errors import EXIT_OK, Failed
from launch.run_folder import STUDY
from trainer.tracking import State, absolute_uri, store_path

START_S = 120
"""Longest wait for the server, which makes its tables the first time."""


@dataclass(frozen=True)
class Curves:
    """Runs of one MLflow store."""

    uri: str
    experiment_id: str
    run_ids: tuple[str, ...]


def dashboard(arguments: argparse.Namespace, console: Console) -> int:
    """Start the server, say where the comparison is, and serve until told to end."""
    curves = find_curves(arguments.folders)
    if store_path(curves.uri) is None:
        console.print(f"comparison {chart_address(curves.uri, curves)}")
        return EXIT_OK
    names = [socket.gethostname(), "localhost", "127.0.0.1", *arguments.allow_host]
    address = f"http://{_reachable(arguments.host)}:{arguments.port}"
    if _in_use(arguments.host, arguments.port):
        raise ValueError(f"port {arguments.port} is in use; choose another by --port")
    server = subprocess.Popen(
        server_command(curves.uri, arguments.host, arguments.port, names),
        env=os.environ
        | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def end(number: int, frame: FrameType | None) -> None:
        os.killpg(server.pid, signal.SIGTERM)

    old = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        _wait_until_up(server, address)
        console.print(f"comparison {chart_address(address, curves)}")
        console.print("Ctrl-C ends the server")
        server.wait()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    return EXIT_OK


def find_curves(folders: Sequence[Path]) -> Curves:
    """Return the runs of folders, those of a study for the study's.

    Raises:
        ValueError: If a folder has no MLflow run, or they are in several stores or experiments.
    """
    found: list[State] = []
    for folder in (run for given in folders for run in _runs_of(given)):
        state = State.read(folder)
        if state is None or state.run_id is None or state.experiment_id is None:
            raise ValueError(f"{folder} has no MLflow run; `roformer report {folder}` delivers it")
        found.append(state)
    if not found:
        raise ValueError(f"{folders[0]} has no runs yet")
    stores = {(absolute_uri(state.uri), state.experiment_id) for state in found}
    if len(stores) > 1:
        raise ValueError(
            "these runs are in several MLflow stores or experiments: give those of one"
        )
    ((uri, experiment_id),) = stores
    return Curves(uri, str(experiment_id), tuple(str(state.run_id) for state in found))


def _runs_of(folder: Path) -> Iterator[Path]:
    study = folder / STUDY
    if not study.exists():
        yield folder
        return
    names = json.loads(study.read_text())["runs"]
    yield from (
        folder / name for runs in names.values() for name in runs if (folder / name).is_dir()
    )


def server_command(uri: str, host: str, port: int, names: Sequence[str]) -> list[str]:
    """Return the command that serves a store to browsers that call it by some names."""
    allowed = ",".join(dict.fromkeys(f"{name}:{port}" for name in names))
    return [
        *(sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri),
        *("--host", host, "--port", str(port), "--workers", "1", "--allowed-hosts", allowed),
    ]


def chart_address(server: str, curves: Curves, metric: str = "train/loss") -> str:
    """Return the address of the page that draws a metric of all runs over steps."""
    values = {
        "runs": json.dumps(curves.run_ids),
        "metric": json.dumps(metric),
        "experiments": json.dumps([curves.experiment_id]),
        "plot_metric_keys": json.dumps([metric]),
        "x_axis": "step",
        "y_axis_scale": "linear",
        "line_smoothness": "1",
        "show_point": "false",
    }
    query = "&".join(f"{key}={quote(value, safe='')}" for key, value in values.items())
    return f"{server.rstrip('/')}/#/metric?{query}"


def _reachable(host: str) -> str:
    return socket.gethostname() if host in ("0.0.0.0", "::") else host


def _in_use(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


def _wait_until_up(server: subprocess.Popen[bytes], address: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise Failed(f"MLflow's server ended at once, with exit code {server.returncode}")
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise Failed(f"MLflow's server did not answer within {START_S} s")
