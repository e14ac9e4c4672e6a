"""MLflow tracking that training never waits for.

Training only writes `metrics.jsonl`. Rank 0 starts one child process (`trainer.delivery`), which
follows that file and tells MLflow:

    rank 0 --- metrics.jsonl ---> child --- log_batch ---> MLflow
          `--- stdin: settings, then one status word ---'
                                  `--- mlflow.json: what has arrived

A server that is slow, dead or silent therefore costs a training step nothing. `mlflow.json` holds
the run's id and how far MLflow has got, so a resumed run goes on in the same MLflow run, and
whatever a server missed is delivered by the next start or by `sync`. When the pipe ends without a
status word, rank 0 has died, and the child ends the run as FAILED.
"""

import json
import logging
import os
import shlex
import subprocess
import sys
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from trainer.config import MlflowConfig

logger = logging.getLogger(__name__)

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]

LARGEST_ARTIFACT = 64 * 2**20  # bytes
ARTIFACTS = (
    "config.yaml",
    "versions.json",
    "study.json",
    "metrics.jsonl",
    "report.md",
    "report.html",
)
CHILD_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "OMP_NUM_THREADS": "1",
}


class Tracker:
    """The child process that follows one run's folder, seen from rank 0."""

    def __init__(self, folder: Path, mlflow: MlflowConfig) -> None:
        self.folder = folder
        self.mlflow = mlflow
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start following; does nothing without a URI."""
        if self.mlflow.uri is None:
            return
        settings = self.mlflow.model_copy(update={"uri": absolute_uri(self.mlflow.uri)})
        with (self.folder / "tracking.log").open("ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "trainer.delivery", str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | CHILD_ENVIRONMENT,
                start_new_session=True,  # a Ctrl-C is for training; the child ends by its pipe
            )
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(settings.model_dump_json().encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            pass  # it died at once: `close` tells

    def close(self, status: Status, timeout_s: float | None = None) -> str | None:
        """Deliver the rest and set the run's status; returns what to tell when that failed.

        `timeout_s` None: 10 s for a server; 60 s for a file, which cannot hang but is slow to
        create.
        """
        if self._child is None or self.mlflow.uri is None:
            return None
        if timeout_s is None:
            timeout_s = 10.0 if store_path(self.mlflow.uri) is None else 60.0
        child, self._child = self._child, None
        try:
            child.communicate(f"{status}\n".encode(), timeout=timeout_s)
            if child.returncode == 0:
                return None
            reason = _last_line(self.folder / "tracking.log")
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            reason = f"not done within {timeout_s:g} s"
        return (
            f"MLflow at {self.mlflow.uri} lacks a part of {self.folder} ({reason}); "
            f"metrics.jsonl is whole, and `roformer report {self.folder}` delivers the rest"
        )


def sync(folder: Path, timeout_s: float | None = None) -> str | None:
    """Deliver what MLflow lacks of a run's or study's folder; returns what to tell on failure."""
    state = State.read(folder)
    if state is None or state.is_complete(folder):
        return None
    settings = MlflowConfig(**{key: getattr(state, key) for key in MlflowConfig.model_fields})
    tracker = Tracker(folder, settings)
    tracker.start()
    left = "FINISHED" if (folder / "done").exists() else "FAILED"  # rank 0 and its child both died
    return tracker.close(state.status or left, timeout_s)  # type: ignore[arg-type]


def start_parent(folder: Path, mlflow: MlflowConfig, timeout_s: float | None = None) -> str | None:
    """Open (or reopen) a study's run, the parent of its arms; returns its id, None without one."""
    tracker = Tracker(folder, mlflow)
    tracker.start()
    if problem := tracker.close("RUNNING", timeout_s):
        logger.warning(problem)
        return None
    state = State.read(folder) if mlflow.uri else None
    return state.run_id if state else None


def finish_parent(
    folder: Path, mlflow: MlflowConfig, status: Status, timeout_s: float | None = None
) -> str | None:
    """Add a study's report to its run and end it; returns what to tell when that failed."""
    tracker = Tracker(folder, mlflow)
    tracker.start()
    return tracker.close(status, timeout_s)


def store_path(uri: str) -> Path | None:
    """File of an SQLite store; None for a server."""
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def absolute_uri(uri: str) -> str:
    """The same store, wherever the next process is started."""
    path = store_path(uri)
    return f"sqlite:///{path.resolve()}" if path else uri


def dashboard_command(uri: str) -> str:
    """What to run to see the curves at http://127.0.0.1:5000; a server's address as it is."""
    if store_path(uri) is None:
        return uri
    program = Path(sys.executable).parent / "mlflow"
    if program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    # without its job runner the server needs 0.3 GB instead of 2
    return (
        f"MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false {shlex.quote(str(program))} server "
        f"--backend-store-uri {shlex.quote(uri)} --workers 1 --port 5000"
    )


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return lines[-1] if lines else "no message"


@dataclass
class State:
    """`mlflow.json`: where a folder's MLflow run is and how much of the folder it has."""

    uri: str
    experiment: str
    run_name: str | None = None
    tags: dict[str, str] = field(default_factory=dict)
    system_metrics: bool = False
    parent_run_id: str | None = None
    experiment_id: str | None = None
    run_id: str | None = None
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Tag of the run; finds it again when the answer to its creation was lost."""
    delivered: int = 0
    """Bytes of metrics.jsonl."""
    steps: dict[str, int] = field(default_factory=dict)
    """Last delivered step of each metric."""
    artifacts: dict[str, int] = field(default_factory=dict)
    """Modification time (ns) of each delivered file."""
    status: Status | None = None
    """The last status asked for; None while the run is being followed."""
    closed: bool = False
    """MLflow has that status."""

    @classmethod
    def read(cls, folder: Path) -> "State | None":
        """The folder's state; None when it was never tracked."""
        path = folder / "mlflow.json"
        return cls(**json.loads(path.read_text())) if path.exists() else None

    def write(self, folder: Path) -> None:
        """Replace the file at once, so that no kill leaves half of it."""
        temporary = folder / "mlflow.json.tmp"
        temporary.write_text(json.dumps(asdict(self), indent=1))
        temporary.replace(folder / "mlflow.json")

    def new_artifacts(self, folder: Path) -> dict[str, int]:
        """Files that MLflow lacks or has in an older form."""
        stats = {n: (folder / n).stat() for n in ARTIFACTS if (folder / n).exists()}
        times = {n: s.st_mtime_ns for n, s in stats.items() if s.st_size <= LARGEST_ARTIFACT}
        return {name: ns for name, ns in times.items() if self.artifacts.get(name) != ns}

    def is_complete(self, folder: Path) -> bool:
        """Whether there is nothing left to deliver."""
        return self.closed and not self.new_artifacts(folder)


def flatten(tree: object, name: str = "") -> dict[str, str]:
    """Every leaf of nested mappings and lists as text, by its dotted name."""
    if isinstance(tree, dict | list) and tree:
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        parts = (flatten(value, f"{name}.{key}" if name else str(key)) for key, value in items)
        return {key: text for part in parts for key, text in part.items()}
    return {name: tree if isinstance(tree, str) else json.dumps(tree, default=str)}
