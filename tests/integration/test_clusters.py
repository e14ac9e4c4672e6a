"""The long form of what is proven on clusters: `make test-clusters`, minutes on two cores."""

import contextlib
import json
import subprocess
import sys

import pytest
import yaml

from tests.conftest import make_documents
from tests.integration.processes import ROOT, read_records, roformer
from tests.integration.test_resume import assert_same_curve, run
from tests.integration.test_slurm import by_step, log_of, submit_run, wait_for_steps
from tests.integration.witness import add_environment, assert_came, make_witness
from tests.launch.test_building import contents
from tests.slurm import obstacle, slurm_cluster, wait_for

pytestmark = [
    pytest.mark.long,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.skipif(obstacle() is not None, reason=str(obstacle())),
]

LONGER = ("curriculum.stages.0.steps=100", "optimizer.lr=1e-4")
MLFLOW = "tracking.mlflow.uri=sqlite:///${run.dir}/mlflow.db"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("clusters") / "cluster", nodes=4) as running:
        yield running


@pytest.fixture
def submit(cluster, tiny_config, monkeypatch):
    return submit_run(cluster, tiny_config, monkeypatch)


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (4, 1)])
def test_nodes_and_ranks_have_the_curve_of_one_rank(cluster, submit, tiny_config, nodes, ranks):
    job, folder = submit(f"launch.nodes={nodes}", f"launch.num_processes={ranks}", *LONGER)
    assert cluster.wait(job, timeout_s=900)["JobState"] == "COMPLETED", log_of(folder)
    cluster.wait_until_empty()
    assert_same_curve(by_step(folder), run(tiny_config, "one", 1, *LONGER))


def test_srun_alone_starts_ranks_by_node_and_by_task(cluster, tiny_config, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    out = cluster.run(
        *("srun", "--nodes=2", "--ntasks=4", sys.executable, "-m", "launch.train", tiny_config),
        *("curriculum.stages.0.steps=1",),
    )
    assert "(2 rows x 1 accumulated x 4 ranks)" in out
    assert (tiny_config.parent / "runs" / "tiny" / "done").exists()


def test_doctor_asks_the_hosts_of_an_allocation(cluster, tiny_config):
    command = [sys.executable, "-m", "launch.cli", "doctor", tiny_config]
    out = cluster.run("salloc", "--nodes=2", "--ntasks-per-node=1", *command, PYTHONPATH=str(ROOT))
    assert "the run would start" in out
    for expected in ("n1", "n2", "eth0", " ms"):
        assert expected in out


def test_a_real_time_limit_cuts_a_run_into_slices_of_one_curve(cluster, submit, tiny_config):
    from mlflow import MlflowClient

    limits = ("launch.slurm.time=2:00", "launch.slurm.signal_s=30")
    long = ("curriculum.stages.0.steps=2000", "optimizer.lr=1e-5")
    with contextlib.ExitStack() as stack:
        try:  # however fast the machine, two time limits pass
            stack.enter_context(cluster.slow_network("16mbit"))
        except OSError as error:
            pytest.skip(f"steps cannot be slowed down here: {error}")
        job, folder = submit("launch.nodes=2", *long, *limits, "checkpoint.every_steps=0", MLFLOW)
        ended = cluster.wait(job, timeout_s=1800)
    assert ended["JobState"] == "COMPLETED", log_of(folder)
    assert int(ended["Restarts"]) >= 2, log_of(folder)
    assert len(read_records(folder)) == 2007
    assert_same_curve(by_step(folder), run(tiny_config, "one", 1, *long))
    client = MlflowClient(f"sqlite:///{folder.parent}/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "roformer"]
    (tracked,) = client.search_runs([experiment.experiment_id])
    assert tracked.info.status == "FINISHED"
    assert len(client.get_metric_history(tracked.info.run_id, "train/loss")) == 2007
    cluster.wait_until_empty()


def test_a_job_preempted_by_a_higher_partition_saves_and_comes_back(cluster, submit):
    job, folder = submit("launch.nodes=4", "curriculum.stages.0.steps=150")
    wait_for_steps(cluster, job, folder, 3)
    cluster.run("srun", "--partition=high", "--nodes=4", "--exclusive", "sleep", "1")
    ended = cluster.wait(job, timeout_s=900)
    assert ended["JobState"] == "COMPLETED", log_of(folder)
    assert ended["Restarts"] == "1"
    steps = [record["step"] for record in read_records(folder)]
    assert steps == list(range(1, 158))
    cluster.wait_until_empty()


def test_a_node_that_loses_power_costs_what_was_not_saved(cluster, submit, tiny_config):
    job, folder = submit("launch.nodes=2", "checkpoint.every_steps=10", *LONGER)
    wait_for_steps(cluster, job, folder, 15)
    lost = cluster.job(job)["NodeList"].replace("[", "").partition("-")[0]
    cluster.crash(lost)
    wait_for("the requeue", lambda: cluster.job(job)["JobState"] != "RUNNING", 120)
    cluster.boot(lost)
    ended = cluster.wait(job, timeout_s=900)
    assert ended["JobState"] == "COMPLETED", log_of(folder)
    assert int(ended["Restarts"]) >= 1
    assert_same_curve(by_step(folder), run(tiny_config, "one", 1, *LONGER))
    cluster.wait_until_empty()


def test_an_array_of_two_seeds_is_a_study(cluster, submit):
    seeds = ("compare.seeds=[1,2]", "run.name=seeds", MLFLOW)
    job, folder = submit("--array", "seeds", *seeds)
    wait_for("both seeds", lambda: len(list(folder.glob("*/done"))) == 2, 900)
    assert sorted(path.name for path in folder.glob("*-seed*")) == ["rope-seed1", "rope-seed2"]
    one, two = (by_step(folder / f"rope-seed{n}") for n in (1, 2))
    assert one[1]["data/hash"] != two[1]["data/hash"]
    logs = sorted(path.name for path in folder.glob("slurm-*.log"))
    assert logs == [f"slurm-{job}_0.log", f"slurm-{job}_1.log"]
    for number in (0, 1):
        assert cluster.wait(f"{job}_{number}")["ExitCode"] == "0:0"
    cluster.wait_until_empty()
    done = roformer("report", folder)
    assert done.returncode == 0, done.stdout
    assert (folder / "report.html").exists()


def test_an_array_writes_the_shards_that_one_command_writes(cluster, submit, tmp_path):
    """Corpora of several units and buckets, which are made small here."""
    small = tmp_path / "python"
    small.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c "
        "'import runpy, sys; from data_pipeline import shards; "
        "shards.UNIT_BYTES, shards.BUCKET_BYTES = 4000, 8000; sys.argv = sys.argv[2:]; "
        """runpy.run_module("launch.cli", run_name="__main__", alter_sys=True)' "$@"\n"""
    )
    small.chmod(0o755)
    lines = [json.dumps({"text": document.text}) + "\n" for document in make_documents(90, seed=3)]
    (tmp_path / "text.jsonl").write_text("".join(lines))
    configs = {}
    for name in ("whole", "parts"):
        configs[name] = tmp_path / f"{name}.yaml"
        content = {
            "run": {"name": name, "dir": str(tmp_path / "runs")},
            "tokenizer": {"kind": "bytes"},
            "corpus": {"train": str(tmp_path / "text.jsonl"), "workers": 1},
            "data": {"train": str(tmp_path / name), "lanes": 4},
            "curriculum": {"stages": [{"name": "a", "seq_len": 8, "global_batch": 2, "steps": 1}]},
            "launch": {"python": str(small)},
        }
        configs[name].write_text(yaml.safe_dump(content))
    whole = subprocess.run(
        [small, "-m", "launch.cli", "shards", configs["whole"]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert whole.returncode == 0, whole.stderr
    done = roformer("launch", configs["parts"], "--slurm", "--shards", "3", "--submit")
    assert done.returncode == 0, done.stdout
    told = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    merge = told["then"].partition("; ")[2].partition(",")[0]
    assert cluster.wait(merge)["JobState"] == "COMPLETED", log_of(tmp_path / "runs" / "parts")
    logs = (tmp_path / "runs" / "parts").glob(f"slurm-{told['job']}_*.log")
    assert len(list(logs)) == 3
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert len(json.loads((tmp_path / "parts" / "index.json").read_text())["shards"]) > 1
    cluster.wait_until_empty()


def test_slurm_hands_on_the_environment_exactly(cluster, submit, tiny_config, tmp_path):
    add_environment(tiny_config)
    job, folder = submit("launch.nodes=2", f"launch.python={make_witness(tmp_path)}")
    ended = cluster.wait(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "1:0"), log_of(folder)
    assert_came(tmp_path, "n1", "n2")


@pytest.mark.parametrize(
    ("overrides", "code"), [(["data.eval=nowhere"], "2:0"), (["optimizer.lr=1e30"], "1:0")]
)
def test_a_failing_job_ends_with_its_code_and_is_not_requeued(
    cluster, submit, tiny_config, overrides, code
):
    folder = tiny_config.parent / "runs" / "tiny"
    folder.mkdir(parents=True)
    words = ["launch", tiny_config, "--slurm", "launch.nodes=2", "optimizer.clip_norm=0"]
    script = roformer(*words).stdout
    broken = folder / "broken.sh"
    broken.write_text(script.replace("overrides=(", f"overrides=({' '.join(overrides)} "))
    (job,) = cluster.run("sbatch", "--parsable", broken).split()
    ended = cluster.wait(job, timeout_s=900)
    assert ended["JobState"] == "FAILED", log_of(folder)
    assert ended["Restarts"] == "0"
    assert ended["ExitCode"] == code or "143" in ended["ExitCode"], log_of(folder)
    cluster.wait_until_empty()
