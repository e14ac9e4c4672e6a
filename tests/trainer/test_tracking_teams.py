"""What teams ask of tracking: a server with a token, names and tags, system metrics."""

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from configs.loader import ConfigError, load
from trainer.config import MlflowConfig
from trainer.delivery import read_tags
from trainer.tracking import State, Tracker

TOKEN = "secret-token-7f3a"


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("run:\n  name: mine\n")
    facts = {"git": "abc123", "hosts": ["n1", "n2"], "slurm_job": "77", "torch": "2.13"}
    (folder / "versions.json").write_text(json.dumps(facts))
    record = {"step": 1, "time": 1.0, "train/loss": 2.0}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    return folder


def test_a_token_goes_to_the_server_and_nowhere_else(folder, monkeypatch):
    seen: list[str | None] = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(self.headers["Authorization"])
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", TOKEN)
    try:
        uri = f"http://127.0.0.1:{server.server_port}"
        tracker = Tracker(folder, MlflowConfig(uri=uri, experiment="e"))
        tracker.start()
        missed = tracker.close("FINISHED", timeout_s=60)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert f"Bearer {TOKEN}" in seen
    assert missed is not None
    assert TOKEN not in missed
    for file in folder.iterdir():
        assert TOKEN not in file.read_text(), file


@pytest.mark.parametrize(
    "uri", ["https://me:secret@mlflow.example", "http://me@mlflow.example:5000/x"]
)
def test_a_uri_with_a_password_is_refused(tiny_config, uri):
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as refused:
        load(tiny_config, [f"tracking.mlflow.uri={uri}"])
    assert "secret" not in str(refused.value)


def test_names_come_by_template(tiny_config):
    names = [
        "tracking.mlflow.experiment=${run.name}-${model.positions}",
        "tracking.mlflow.run_name=seed${run.seed}",
        "tracking.mlflow.tags.team=nlp",
    ]
    mlflow = load(tiny_config, names).tracking.mlflow
    assert (mlflow.experiment, mlflow.run_name) == ("tiny-rope", "seed17")
    assert mlflow.tags == {"team": "nlp"}


def test_run_has_its_name_its_tags_and_system_metrics(folder, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
    uri = f"sqlite:///{folder.parent}/mlflow.db"
    settings = MlflowConfig(
        uri=uri, experiment="e", run_name="seed17", tags={"team": "nlp"}, system_metrics=True
    )
    tracker = Tracker(folder, settings)
    tracker.start()
    state = None
    from tests.slurm import wait_for

    def has_system_metrics() -> bool:
        nonlocal state
        state = State.read(folder)
        if state is None or state.run_id is None:
            return False  # until then the store's tables are not there
        run = MlflowClient(uri).get_run(state.run_id)
        return "system/cpu_utilization_percentage" in run.data.metrics

    wait_for("system metrics", has_system_metrics, 120)
    assert tracker.close("FINISHED", timeout_s=60) is None
    assert state is not None
    assert state.run_id is not None
    run = MlflowClient(uri).get_run(state.run_id)
    assert run.info.run_name == "seed17"
    assert run.data.metrics["train/loss"] == 2.0
    expected = {"git": "abc123", "hosts": "n1, n2", "slurm.job_id": "77", "team": "nlp"}
    assert run.data.tags.items() >= expected.items()
    assert run.data.tags["config"] == "run:\n  name: mine\n"


def test_what_is_not_known_is_no_tag(tmp_path):
    assert read_tags(tmp_path) == {}


def test_runs_that_begin_together_make_the_store_once(folder, tmp_path):
    settings = MlflowConfig(uri=f"sqlite:///{tmp_path}/new/mlflow.db", experiment="e")
    trackers = []
    for number in range(3):
        other = tmp_path / str(number)
        shutil.copytree(folder, other)
        trackers.append(Tracker(other, settings))
    for tracker in trackers:
        tracker.start()
    assert [tracker.close("FINISHED", timeout_s=120) for tracker in trackers] == [None] * 3
    for tracker in trackers:
        assert "Error" not in (tracker.folder / "tracking.log").read_text()
