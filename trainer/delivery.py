"""The program that brings one run's folder to MLflow: the child process of `trainer.tracking`.

A step that was logged again after a resume is delivered once: the first time. Of a long run MLflow
gets fewer points the later they are (`is_due`), so that its pages stay quick; metrics.jsonl has
them all.
"""

import fcntl
import json
import math
import os
import posixpath
import re
import select
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from trainer.config import MlflowConfig
from trainer.tracking import State, Status, flatten, store_path

if TYPE_CHECKING:
    from mlflow import MlflowClient

POLL_S, RETRY_S = 3.0, 10.0
LAST_S = 120  # whatever hangs: the longest life after rank 0's last word
ORPHAN_S = 20  # and after rank 0's death
POINTS = 2048  # of a curve that MLflow gets at equal distances, before they grow
RECORDS_A_BATCH = 50
MAX_METRICS, MAX_PARAMS, MAX_KEY, MAX_PARAM, MAX_TAG = 1000, 100, 250, 6000, 5000  # MLflow's limits


class Delivery:
    """Brings one folder to MLflow; every call goes on where the last one stopped or failed."""

    def __init__(self, folder: Path, settings: MlflowConfig) -> None:
        assert settings.uri is not None
        self.folder = folder
        state = State.read(folder)
        if state is None or (state.uri, state.experiment) != (settings.uri, settings.experiment):
            state = State(settings.uri, settings.experiment)
        state.parent_run_id = settings.parent_run_id
        state.run_name, state.tags = settings.run_name, settings.tags
        state.system_metrics = settings.system_metrics
        state.status, state.closed = None, False
        state.write(folder)
        self.state = state
        self._client: MlflowClient | None = None

    def send(self, status: Status | None) -> None:
        """Deliver what is new, and with a status also the artifacts and the run's end."""
        if status:
            self.state.status = status
            self.state.write(self.folder)  # first: a later `sync` then ends the run as asked
        if self._client is None:
            self._client = self._connect()
        self._send_metrics(self._client, is_end=status is not None)
        if status:
            self._send_end(self._client, status)

    def _connect(self) -> "MlflowClient":
        """Find or make the experiment and the run, and give it its parameters."""
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        state = self.state
        store = store_path(state.uri)
        if store:
            store.parent.mkdir(parents=True, exist_ok=True)
            with _alone(store.parent):  # runs that begin together would all make its tables
                client = MlflowClient(state.uri)
        else:
            client = MlflowClient(state.uri)
        experiment = client.get_experiment_by_name(state.experiment)
        state.experiment_id = (
            experiment.experiment_id
            if experiment
            else client.create_experiment(
                state.experiment,
                artifact_location=str(store.parent / "mlartifacts") if store else None,
            )
        )
        if state.run_id:
            try:
                stage = client.get_run(state.run_id).info.lifecycle_stage
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                stage = "gone"
            if stage != "active":  # somebody removed it: tell the whole story again
                state.run_id, state.delivered, state.steps, state.artifacts = None, 0, {}, {}
                state.key = uuid.uuid4().hex
        if not state.run_id:
            state.write(self.folder)  # the key, before the run exists
            found = client.search_runs([state.experiment_id], f"tags.roformer_key = '{state.key}'")
            run = (
                found[0]
                if found
                else client.create_run(
                    state.experiment_id,
                    start_time=_modified_ms(self.folder / "config.yaml"),
                    tags={"roformer_key": state.key},
                    run_name=state.run_name or self.folder.name,
                )
            )
            state.run_id = run.info.run_id
        state.write(self.folder)
        client.update_run(state.run_id, status="RUNNING")
        if state.parent_run_id:
            client.set_tag(state.run_id, "mlflow.parentRunId", state.parent_run_id)
        self._send_params(client, state.run_id)
        for name, text in (read_tags(self.folder) | state.tags).items():
            client.set_tag(state.run_id, metric_name(name), text[:MAX_TAG])
        return client

    def _send_params(self, client: "MlflowClient", run_id: str) -> None:
        """Log the new parameters; MLflow's are final, so a changed one becomes a tag."""
        from mlflow.entities import Param, RunTag

        params = read_params(self.folder)
        known = client.get_run(run_id).data.params
        new = [Param(name, value) for name, value in params.items() if name not in known]
        changed = [
            RunTag(f"changed/{name}"[:MAX_KEY], value[:MAX_TAG])
            for name, value in params.items()
            if known.get(name, value) != value
        ]
        for start in range(0, len(new), MAX_PARAMS):
            client.log_batch(run_id, params=new[start : start + MAX_PARAMS])
        for start in range(0, len(changed), MAX_PARAMS):
            client.log_batch(run_id, tags=changed[start : start + MAX_PARAMS])

    def _send_metrics(self, client: "MlflowClient", *, is_end: bool) -> None:
        """Log the complete lines behind the delivered ones, and note each batch that arrived."""
        from mlflow.entities import Metric

        state = self.state
        assert state.run_id is not None
        lines = self._new_lines()
        while batch := list(islice(lines, RECORDS_A_BATCH)):
            steps = dict(state.steps)
            metrics = []
            is_last = is_end and len(batch) < RECORDS_A_BATCH
            for number, line in enumerate(batch, 1):
                points = list(read_points(line))
                is_whole = any(name == "eval/loss" for name, *_ in points) or (
                    is_last and number == len(batch)
                )
                for name, value, step, time_ms in points:
                    last = steps.get(name, 0)
                    if step > last if is_whole else is_due(step, last):
                        metrics.append(Metric(name, value, time_ms, step))
                        steps[name] = step
            for start in range(0, len(metrics), MAX_METRICS):
                client.log_batch(state.run_id, metrics=metrics[start : start + MAX_METRICS])
            state.delivered += sum(map(len, batch))
            state.steps = steps
            state.write(self.folder)

    def _new_lines(self) -> Iterator[bytes]:
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return
        if path.stat().st_size < self.state.delivered:  # rewritten: known steps are not sent again
            self.state.delivered = 0
        with path.open("rb") as file:
            file.seek(self.state.delivered)
            yield from (line for line in file if line.endswith(b"\n"))

    def _send_end(self, client: "MlflowClient", status: Status) -> None:
        state = self.state
        assert state.run_id is not None
        for name, modified_ns in state.new_artifacts(self.folder).items():
            client.log_artifact(state.run_id, str(self.folder / name))
            state.artifacts[name] = modified_ns
        if status != "RUNNING":
            end = _modified_ms(self.folder / "metrics.jsonl")
            client.set_terminated(state.run_id, status, end)
        state.closed = status != "RUNNING"
        state.write(self.folder)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait for other processes here, where the file system has locks for folders."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _modified_ms(path: Path) -> int | None:
    return int(path.stat().st_mtime * 1000) if path.exists() else None


def metric_name(name: str) -> str:
    """The name with what MLflow refuses replaced: `acc[%]` -> `acc___`."""
    plain = posixpath.normpath(re.sub(r"[^/\w.\- :]", "_", name)).lstrip("./")
    return plain[:MAX_KEY] or "_"


def read_points(line: bytes) -> Iterator[tuple[str, float, int, int]]:
    """The (name, value, step, time in ms) of a line's finite numbers; none of a torn line."""
    try:
        record = json.loads(line)
        step, time_ms = int(record["step"]), int(record["time"] * 1000)
    except (ValueError, KeyError, TypeError):
        return
    for name, value in record.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and math.isfinite(value) and name not in ("step", "time"):
            yield metric_name(name), float(value), step, time_ms


def is_due(step: int, last: int) -> bool:
    """Whether MLflow gets a step's point, after that of step `last`.

    All up to step 2 x `POINTS`; from there on the distance grows with the step, so that a curve of
    450,000 steps has 15,000 points. Those with an evaluation come in any case.
    """
    return step - last >= max(1, step // POINTS)


def read_params(folder: Path) -> dict[str, str]:
    """MLflow's parameters: config.yaml's leaves, and versions.json's under `versions`."""
    leaves: dict[str, str] = {}
    for file, name in (("config.yaml", ""), ("versions.json", "versions")):
        if (folder / file).exists():
            leaves |= flatten(yaml.safe_load((folder / file).read_text()), name)
    return {metric_name(name): text[:MAX_PARAM] for name, text in leaves.items()}


def read_tags(folder: Path) -> dict[str, str]:
    """Where and from what a run was made: Slurm's job, hosts, git revision, config."""
    facts = folder / "versions.json"
    known = json.loads(facts.read_text()) if facts.exists() else {}
    found = {"slurm.job_id": known.get("slurm_job"), "git": known.get("git")}
    found["hosts"] = ", ".join(known.get("hosts") or []) or None
    if (folder / "config.yaml").exists():
        found["config"] = (folder / "config.yaml").read_text()
    return {name: str(value) for name, value in found.items() if value is not None}


def start_system_metrics(state: State) -> Callable[[], None]:
    """Log what this host's devices do into the run, until what is returned is called."""
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    monitor = SystemMetricsMonitor(state.run_id, resume_logging=True, tracking_uri=state.uri)
    monitor.start()
    return monitor.finish


def main() -> int:
    """Follow the folder until rank 0 says how the run ended, or dies; 0 when all was delivered."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    folder, rank_0 = Path(sys.argv[1]), os.getppid()
    delivery = None
    status: Status | None = None
    problem: str | None = None
    wait_s = 0.0
    end_system_metrics: Callable[[], None] | None = None
    with open(0, "rb", buffering=0) as stdin:
        settings = MlflowConfig.model_validate_json(stdin.readline())
        while status is None:
            told, _, _ = select.select([stdin], [], [], wait_s)
            # loader workers forked from rank 0 may hold the pipe open, so look at the parent too
            if told or os.getppid() != rank_0:
                signal.alarm(LAST_S if told else ORPHAN_S)
                status = stdin.readline().decode().strip() if told else ""  # type: ignore[assignment]
                status = status or "FAILED"
            try:
                if delivery is None:
                    fcntl.flock(
                        1, fcntl.LOCK_EX | fcntl.LOCK_NB
                    )  # tracking.log: one child a folder
                    delivery = Delivery(folder, settings)
                if status and end_system_metrics is not None:
                    end_system_metrics()
                delivery.send(status)
                if settings.system_metrics and status is None and end_system_metrics is None:
                    end_system_metrics = start_system_metrics(delivery.state)
                problem, wait_s = None, POLL_S
            except BlockingIOError:
                problem, wait_s = "another process is delivering this folder", POLL_S
            except Exception as error:  # any: MLflow's, requests', SQLAlchemy's; training goes on
                text = " ".join(str(error).split())[:160]
                if problem != (problem := f"{type(error).__name__}: {text}"):
                    print(time.strftime("%F %T"), problem, flush=True)
                wait_s = RETRY_S
    if problem:
        print(problem, flush=True)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
