"""The tracker against a real SQLite store, killed parents, dead and silent servers."""

import fcntl
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient

from trainer.config import MlflowConfig
from trainer.delivery import (
    POINTS,
    Delivery,
    is_due,
    metric_name,
    read_params,
    read_points,
)
from trainer.tracking import (
    State,
    Status,
    Tracker,
    absolute_uri,
    dashboard_command,
    finish_parent,
    flatten,
    start_parent,
    sync,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's use of SQLAlchemy


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MlflowConfig:
    """A real store, which the first child has to create."""
    path = tmp_path_factory.mktemp("store") / "made" / "mlflow.db"
    return MlflowConfig(uri=f"sqlite:///{path}", experiment="test")


@pytest.fixture(scope="module")
def study(store: MlflowConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    study = tmp_path_factory.mktemp("study")
    parent = start_parent(study, store)
    assert parent == run_id(study)
    return study


@pytest.fixture(scope="module")
def client(store: MlflowConfig, study: Path) -> MlflowClient:
    return MlflowClient(store.uri)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "rope"
    run.mkdir()
    write_config(run, lr="1e-3")
    return run


def write_config(run: Path, **options: object) -> None:
    many = {f"option{n}": n for n in range(150)}  # more than one batch of parameters
    config = {"run": {"name": "rope"}, "long": "x" * 20_000, "many": many, **options}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "versions.json").write_text(json.dumps({"world": 2, "git": None}))


def log(
    run: Path, *steps: int, time_s: float = 1.8e9, more: dict[str, object] | None = None
) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        for step in steps:
            record = {"time": time_s + step, "step": step, "stage": "a", "train/loss": 9.0 - step}
            file.write(json.dumps(record | (more or {})) + "\n")


def deliver(run: Path, store: MlflowConfig, status: Status = "FINISHED") -> str:
    """What the child does, without the child: quick."""
    Delivery(run, store).send(status)
    return run_id(run)


def run_id(run: Path) -> str:
    state = State.read(run)
    assert state is not None
    assert state.run_id is not None
    return state.run_id


def points(client: MlflowClient, run: str, name: str = "train/loss") -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client.get_metric_history(run, name)]


def wait_for(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_run_has_curves_parameters_artifacts_and_status(
    folder: Path, store: MlflowConfig, client: MlflowClient
) -> None:
    log(folder, 1, 2)
    log(folder, 3, more={"eval/loss": None, "acc[%]": 0.5, "data/hash": "ab", "grad_norm": 1})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"time": 1, "step": 4, "train/lo')  # a kill has torn it
    tracker = Tracker(folder, store)
    tracker.start()
    assert tracker.close("FINISHED") is None, (folder / "tracking.log").read_text()
    run = client.get_run(run_id(folder))
    assert points(client, run.info.run_id) == [(1, 8.0), (2, 7.0), (3, 6.0)]
    assert set(run.data.metrics) == {"train/loss", "acc___", "grad_norm"}
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [point.timestamp for point in history] == [
        1_800_000_000_000 + 1000 * n for n in (1, 2, 3)
    ]
    assert len(run.data.params) == 155
    assert run.data.params["lr"] == "1e-3"
    assert run.data.params["many.option149"] == "149"
    assert run.data.params["long"] == "x" * 6000
    assert run.data.params["versions.world"] == "2"
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "rope"
    artifacts = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert artifacts == {"config.yaml", "versions.json", "metrics.jsonl"}


def test_resumed_run_goes_on_in_the_same_run_and_sends_no_point_twice(
    folder: Path, store: MlflowConfig, client: MlflowClient
) -> None:
    log(folder, 1, 2, 3)
    first = deliver(folder, store, "KILLED")
    assert client.get_run(first).info.status == "KILLED"
    write_config(folder, lr="2e-3", new="yes")
    log(folder, 2, 3, 4, time_s=1.9e9)  # from the checkpoint of step 1: later, other seconds
    assert deliver(folder, store) == first
    run = client.get_run(first)
    assert points(client, first) == [(1, 8.0), (2, 7.0), (3, 6.0), (4, 5.0)]
    assert run.info.status == "FINISHED"
    assert run.data.params["lr"] == "1e-3"  # MLflow's parameters are final
    assert run.data.params["new"] == "yes"
    assert {name: v for name, v in run.data.tags.items() if name.startswith("changed/")} == {
        "changed/lr": "2e-3"
    }

    state = State.read(folder)  # a child killed between MLflow's answer and its own note of it
    assert state is not None
    state.delivered, state.steps = 0, {}
    state.write(folder)
    (folder / "metrics.jsonl").write_text("")
    log(folder, 1, 2, 3)
    deliver(folder, store)
    assert len(points(client, first)) == 4


def test_half_a_line_waits_for_its_other_half(
    folder: Path, store: MlflowConfig, client: MlflowClient
) -> None:
    log(folder, 1, 2)
    whole = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(whole[:-20])
    run = deliver(folder, store)
    assert len(points(client, run)) == 1
    (folder / "metrics.jsonl").write_bytes(whole)
    deliver(folder, store)
    assert len(points(client, run)) == 2


def test_removed_run_is_told_again(folder: Path, store: MlflowConfig, client: MlflowClient) -> None:
    log(folder, 1, 2)
    first = deliver(folder, store)
    client.delete_run(first)
    second = deliver(folder, store)
    assert second != first
    assert len(points(client, second)) == 2


def test_lost_answer_to_the_creation_makes_no_second_run(
    folder: Path, store: MlflowConfig, client: MlflowClient
) -> None:
    first = deliver(folder, store)
    state = State.read(folder)
    assert state is not None
    state.run_id = None
    state.write(folder)
    assert deliver(folder, store) == first


def test_study_is_the_parent_of_its_arms(
    study: Path, folder: Path, store: MlflowConfig, client: MlflowClient
) -> None:
    parent = run_id(study)
    assert client.get_run(parent).info.status == "RUNNING"
    arm = deliver(folder, store.model_copy(update={"parent_run_id": parent}))
    assert client.get_run(arm).data.tags["mlflow.parentRunId"] == parent
    (study / "report.md").write_text("# verdict")
    assert finish_parent(study, store, "FINISHED") is None
    assert run_id(study) == parent
    assert client.get_run(parent).info.status == "FINISHED"
    assert [file.path for file in client.list_artifacts(parent)] == ["report.md"]
    before = (study / "tracking.log").stat().st_mtime_ns
    assert sync(study) is None  # nothing left: no process is started
    assert (study / "tracking.log").stat().st_mtime_ns == before


def test_one_process_delivers_a_folder(folder: Path, store: MlflowConfig) -> None:
    with (folder / "tracking.log").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        tracker = Tracker(folder, store)
        tracker.start()
        message = tracker.close("FINISHED")
    assert message is not None
    assert "another process is delivering" in message


RANK_0 = """
import os, sys, time
from pathlib import Path
from trainer.config import MlflowConfig
from trainer.tracking import Tracker
tracker = Tracker(Path(sys.argv[1]), MlflowConfig(uri=sys.argv[2], experiment="test"))
tracker.start()
if os.fork():
    print(tracker._child.pid, flush=True)
else:  # like a loader worker, it outlives rank 0 and holds the pipe open
    os.close(1)
time.sleep(60)
"""


def test_child_ends_the_run_as_failed_when_rank_0_is_killed(
    folder: Path, store: MlflowConfig, client: MlflowClient
) -> None:
    log(folder, 1, 2)
    rank_0 = subprocess.Popen(
        [sys.executable, "-c", RANK_0, str(folder), str(store.uri)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert rank_0.stdout is not None
    child = int(rank_0.stdout.readline())
    try:
        wait_for(lambda: (folder / "mlflow.json").exists() and State.read(folder).delivered > 0)  # type: ignore[union-attr]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(child, number)
        log(folder, 3)
        rank_0.kill()
        rank_0.wait()
        wait_for(lambda: not is_alive(child))
    finally:
        os.killpg(rank_0.pid, signal.SIGKILL)
        rank_0.stdout.close()
    run = client.get_run(run_id(folder))
    assert run.info.status == "FAILED"
    assert len(points(client, run.info.run_id)) == 3


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def silent_server() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:  # accepts, never answers
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_silent_server_is_left_behind_in_time(folder: Path, silent_server: str) -> None:
    tracker = Tracker(folder, MlflowConfig(uri=silent_server, experiment="test"))
    log(folder, 1)
    start = time.monotonic()
    tracker.start()
    started = time.monotonic() - start
    message = tracker.close("FINISHED", timeout_s=3)
    assert started < 0.5
    assert time.monotonic() - start < 5
    assert message is not None
    assert "not done within 3 s" in message
    assert "roformer report" in message


def test_what_a_refusing_server_missed_is_delivered_later(
    folder: Path, store: MlflowConfig, client: MlflowClient
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{closed.getsockname()[1]}"
    log(folder, 1, 2)
    tracker = Tracker(folder, MlflowConfig(uri=uri, experiment="test"))
    tracker.start()
    start = time.monotonic()
    message = tracker.close("KILLED")
    assert time.monotonic() - start < 11
    assert message is not None
    assert message.count("\n") == 0
    state = State.read(folder)
    assert state is not None
    assert (state.status, state.closed, state.run_id) == ("KILLED", False, None)

    state.uri = str(store.uri)  # the server is back
    state.write(folder)
    assert sync(folder) is None
    assert client.get_run(run_id(folder)).info.status == "KILLED"
    assert len(points(client, run_id(folder))) == 2


def test_without_uri_nothing_is_started(folder: Path) -> None:
    off = MlflowConfig(uri=None)
    tracker = Tracker(folder, off)
    tracker.start()
    assert tracker.close("FINISHED") is None
    assert start_parent(folder, off) is None
    assert sync(folder) is None
    assert {file.name for file in folder.iterdir()} == {"config.yaml", "versions.json"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("train/loss", "train/loss"),
        ("acc[%]", "acc___"),
        ("a//b/../c", "a/c"),
        ("../..", "_"),
        ("/abs", "abs"),
        ("x" * 300, "x" * 250),
    ],
)
def test_metric_name(name: str, expected: str) -> None:
    assert metric_name(name) == expected


def test_read_points_leaves_out_what_is_no_finite_number() -> None:
    line = b'{"time": 2.5, "step": 3, "a": 1, "b": null, "c": "x", "d": true, "e": Infinity}'
    assert list(read_points(line)) == [("a", 1.0, 3, 2500)]
    assert list(read_points(line[:-1])) == []
    assert list(read_points(b"3\n")) == []


def test_flatten() -> None:
    tree = {"a": {"b": [1, {"c": None}]}, "d": [], "e": "1e-5", "f": True}
    assert flatten(tree) == {
        "a.b.0": "1", "a.b.1.c": "null", "d": "[]", "e": "1e-5", "f": "true"
    }  # fmt: skip


def test_params_of_an_empty_folder(tmp_path: Path) -> None:
    assert read_params(tmp_path) == {}


def test_dashboard_command_and_uri(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_uri("sqlite:///runs/a.db") == f"sqlite:///{tmp_path}/runs/a.db"
    assert absolute_uri("http://host:5000") == dashboard_command("http://host:5000")
    command = dashboard_command("sqlite:///my runs/a.db")
    assert "server --backend-store-uri 'sqlite:///my runs/a.db'" in command


def test_points_of_a_long_run_are_thinned_by_step() -> None:
    sent = [0]
    for step in range(1, 450_001):
        if is_due(step, sent[-1]):
            sent.append(step)
    assert sent[: 2 * POINTS] == list(range(2 * POINTS))
    assert 10_000 < len(sent) < 16_000
    assert max(b / a for a, b in itertools.pairwise(sent) if a > 2 * POINTS) < 1.001
    sparse = [step for step in range(1000, 450_001, 1000) if is_due(step, step - 1000)]
    assert len(sparse) == 450  # a run that logs every 1,000 steps is not thinned further


def test_evaluations_and_the_last_point_are_never_thinned(
    folder: Path, store: MlflowConfig, client: MlflowClient
) -> None:
    log(folder, 50_000, 50_001, 50_002)
    log(folder, 50_003, more={"eval/loss": 1.0})
    log(folder, 50_004, 50_005)
    run = deliver(folder, store)
    assert [step for step, _ in points(client, run)] == [50_000, 50_003, 50_005]
    assert [step for step, _ in points(client, run, "eval/loss")] == [50_003]
