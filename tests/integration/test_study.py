"""A whole study as a user runs it: launcher, two processes an arm, MLflow's database."""

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
import yaml

from launch.cli import main
from tests.browser import CHROMIUM, DRIVER, browser
from tests.conftest import TINY
from tests.integration.processes import ROOT, read_records, roformer
from tests.slurm import wait_for
from trainer.distributed import free_port

pytestmark = pytest.mark.xdist_group("study")  # the study is trained once


@pytest.fixture(scope="session")
def study(tiny_shards, tmp_path_factory):
    """Run a whole study: two arms, two processes each, through the launcher, with MLflow."""
    folder = tmp_path_factory.mktemp("study")
    config = folder / "study.yaml"
    config.write_text(
        yaml.safe_dump(
            TINY
            | {
                "run": {"name": "study", "dir": str(folder / "runs"), "batch_hash": True},
                "data": {
                    "train": str(tiny_shards / "train"),
                    "eval": str(tiny_shards / "eval"),
                    "lanes": 8,
                },
                "launch": {"num_processes": 2},
                "evaluation": {"every_steps": 3, "seq_len": 32},
                "tracking": {"every_steps": 1},
            }
        )
    )
    done = roformer("compare", config)
    assert done.returncode == 0, done.stdout
    return folder / "runs", config, done.stdout


def test_study_pairs_its_arms(study):
    runs, _, _ = study
    rope, learned = (read_records(runs / "study" / arm) for arm in ("rope", "learned"))
    assert [r["data/hash"] for r in rope] == [r["data/hash"] for r in learned]
    assert len(rope) == 12
    assert [r["eval/targets"] for r in rope if "eval/loss" in r] == [
        r["eval/targets"] for r in learned if "eval/loss" in r
    ]
    assert [r["train/loss"] for r in rope] != [r["train/loss"] for r in learned]
    needed = {
        *("step", "tokens", "stage", "seq_len", "global_batch", "micro_batch", "accumulation"),
        *("lr", "train/loss", "train/accuracy", "train/targets", "grad_norm", "data/hash"),
        *("perf/tokens_per_s", "perf/mfu", "perf/data_wait_s", "memory/peak_gib"),
    }
    assert needed <= rope[0].keys()


def test_study_ends_with_table_report_and_the_way_to_mlflow(study):
    runs, _, output = study
    for text in ("rope", "learned", "held-out", str(runs / "study" / "report.html"), "dashboard"):
        assert text in output
    page = (runs / "study" / "report.html").read_text()
    assert "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://127.0.0.1", "")


def test_study_is_in_mlflow_as_parent_and_children(study):
    from mlflow import MlflowClient

    runs, config, _ = study
    client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    (experiment,) = [e for e in client.search_experiments() if e.name == "roformer"]
    found = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert found.keys() == {"study", "rope", "learned"}
    for arm in ("rope", "learned"):
        run = found[arm]
        assert run.info.status == "FINISHED"
        assert run.data.tags["mlflow.parentRunId"] == found["study"].info.run_id
        assert run.data.params["model.positions"] == arm
        history = client.get_metric_history(run.info.run_id, "train/loss")
        assert [point.step for point in history] == list(range(1, 13))
    names = {item.path for item in client.list_artifacts(found["study"].info.run_id)}
    assert "report.html" in names
    assert config.exists()


def test_a_finished_study_is_not_trained_again(study):
    runs, config, _ = study
    before = (runs / "study" / "rope" / "metrics.jsonl").stat().st_mtime_ns
    done = roformer("compare", config)
    assert done.returncode == 0
    assert "finished before" in done.stdout
    assert (runs / "study" / "rope" / "metrics.jsonl").stat().st_mtime_ns == before


def test_report_of_single_runs(study, tmp_path):
    runs, _, _ = study
    done = roformer("report", runs / "study" / "rope")
    assert done.returncode == 0
    assert (runs / "study" / "rope" / "report.html").exists()
    missing = roformer("report", tmp_path / "nowhere")
    assert missing.returncode == 2
    assert missing.stdout.startswith("roformer: error: ")
    assert missing.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("arm", "architecture"), [("rope", "RoFormerForMaskedLM"), ("learned", "BertForMaskedLM")]
)
def test_export_is_a_folder_that_hugging_face_loads(study, tmp_path, arm, architecture):
    import torch
    import transformers

    from configs.loader import load
    from model.heads import LanguageModel
    from trainer import checkpoint

    run = study[0] / "study" / arm
    assert main(["export", str(run), str(tmp_path / "hf")]) == 0
    theirs, loading = getattr(transformers, architecture).from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    saved = checkpoint.load(checkpoint.complete(run / "checkpoints")[0])
    ours = LanguageModel(load(run / "config.yaml").model, vocab_size=theirs.config.vocab_size)
    ours.load_state_dict(saved.weights)
    ids = torch.arange(5, 45)
    with torch.no_grad():
        logits = ours.eval().logits(ids, torch.arange(40), (40,), torch.arange(40))
        expected = theirs.eval()(ids[None]).logits[0]
    assert torch.allclose(logits, expected, atol=1e-5)
    assert main(["export", str(run), str(tmp_path / "hf")]) == 2  # it is there already


def test_run_folder_explains_itself(study):
    from configs.loader import load

    runs, _, _ = study
    folder = runs / "study" / "rope"
    assert load(folder / "config.yaml").model.positions == "rope"
    head = (folder / "config.yaml").read_text()
    for fact in ("# torch:", "# deepspeed:", "# git:", "# tokenizer:", "# data:"):
        assert fact in head
    assert (folder / "done").exists()
    (checkpoint,) = [p for p in (folder / "checkpoints").iterdir() if p.name == "step-00000012"]
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text())
    assert manifest["files"].keys() == {p.name for p in checkpoint.iterdir()} - {"MANIFEST.json"}


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium and chromium-driver")
def test_dashboard_shows_the_curves_of_both_arms_in_a_browser(study, tmp_path):
    runs, _, _ = study
    port = str(free_port())
    command = [sys.executable, "-m", "launch.cli", "dashboard", str(runs / "study"), "--port", port]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as shown:
        assert shown.stdout is not None
        try:
            address = shown.stdout.readline().split()[-1]
            assert address.startswith(f"http://127.0.0.1:{port}/#/metric?runs=")
            with browser() as window:
                window.open(address)
                curves = ".js-plotly-plot .scatterlayer .trace"
                wait_for("both curves", lambda: window.count(curves) >= 2, 60)
                legend = window.text()
                window.screenshot(tmp_path / "chart.png")
            assert "rope" in legend
            assert "learned" in legend
            assert (tmp_path / "chart.png").stat().st_size > 20_000
            there = f"http://127.0.0.1:{port}/"
            request = urllib.request.Request(there, headers={"Host": "evil.test"})
            with pytest.raises(urllib.error.HTTPError, match="403") as refused:
                urllib.request.urlopen(request, timeout=30)
            refused.value.close()
        finally:
            shown.send_signal(signal.SIGTERM)
            assert shown.wait(30) == 0
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{there}health", timeout=5)
