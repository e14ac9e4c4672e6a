"""Runs on a real Slurm of two nodes, each with a network and processes of its own."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.processes import ROOT, read_records, roformer
from tests.integration.test_resume import assert_same_curve, run
from tests.slurm import Cluster, obstacle, slurm_cluster, wait_for

pytestmark = [
    pytest.mark.xdist_group("slurm"),  # one cluster at a time
    pytest.mark.skipif(obstacle() is not None, reason=str(obstacle())),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster", nodes=2) as running:
        yield running


@pytest.fixture
def submit(cluster, tiny_config, monkeypatch):
    return submit_run(cluster, tiny_config, monkeypatch)


def submit_run(cluster: Cluster, config: Path, monkeypatch) -> Callable[..., tuple[str, Path]]:
    """Return a function that submits a run: its job's number and its folder."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def start(*arguments: str) -> tuple[str, Path]:
        done = roformer("launch", config, "--slurm", "--submit", *arguments)
        assert done.returncode == 0, done.stdout
        told = dict(line.split(maxsplit=1) for line in done.stdout.splitlines()[:3])
        return told["job"], Path(told["script"]).parent

    return start


def log_of(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("slurm-*.log")))


def wait_for_steps(cluster: Cluster, job: str, folder: Path, steps: int) -> None:
    def reached() -> bool:
        assert cluster.job(job)["JobState"] in ("PENDING", "RUNNING"), log_of(folder)
        return (folder / "metrics.jsonl").exists() and len(read_records(folder)) >= steps

    wait_for(f"step {steps} of {folder}", reached)


def by_step(folder: Path) -> dict[int, dict]:
    return {record["step"]: record for record in read_records(folder)}


def test_two_nodes_signalled_and_requeued_have_the_curve_of_one_rank(cluster, submit, tiny_config):
    longer = ("curriculum.stages.0.steps=100", "optimizer.lr=1e-4")
    job, folder = submit("run.name=two", "launch.nodes=2", *longer)
    wait_for_steps(cluster, job, folder, 3)
    cluster.run("scancel", "--batch", "--signal=USR1", job)  # as Slurm does before the time limit
    ended = cluster.wait(job)
    assert ended["JobState"] == "COMPLETED", log_of(folder)
    assert ended["Restarts"] == "1"
    assert (folder / "done").exists()
    assert "saved; queued again" in log_of(folder)
    assert "rank 1 on n2" in (folder / "logs" / "rank-00001.log").read_text()
    cluster.wait_until_empty()
    assert len(read_records(folder)) == 107  # no step was done twice
    assert_same_curve(by_step(folder), run(tiny_config, "one", 1, *longer))


def test_a_cancelled_job_saves_and_stays_away(cluster, submit):
    job, folder = submit("run.name=cancelled", "curriculum.stages.0.steps=2000")
    wait_for_steps(cluster, job, folder, 3)
    cluster.run("scancel", job)
    assert cluster.wait(job)["JobState"] == "CANCELLED"
    cluster.wait_until_empty()
    assert (folder / "requeue").exists()  # it has saved, and a new job would go on
    newest = max((folder / "checkpoints").glob("step-*/state.json"))
    saved = json.loads(newest.read_text())
    assert saved["step"] == read_records(folder)[-1]["step"] < 2000
    assert cluster.job(job)["JobState"] == "CANCELLED"
    assert cluster.job(job)["Restarts"] == "0"


def test_srun_alone_starts_ranks_and_one_with_another_config_is_refused(
    cluster, tiny_config, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    one, other = tiny_config, tiny_config.with_name("other.yaml")
    other.write_text(one.read_text().replace("lr: 0.001", "lr: 0.002"))
    assert other.read_text() != one.read_text()
    chosen = f"[ $SLURM_NODEID = 0 ] && config={one} || config={other}; "
    by_node = f"{chosen} exec {sys.executable} -m launch.train $config"
    out = cluster.run("srun", "--nodes=2", "bash", "-c", by_node, check=False)
    assert "roformer: error: rank 1 (n2): optimizer.lr is 0.002, and 0.001 on rank 0 (n1)" in out, (
        out
    )
    assert "Traceback" not in out
    assert not (tiny_config.parent / "runs" / "tiny" / "config.yaml").exists()
