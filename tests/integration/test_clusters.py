"""The long form of what is proven on clusters: `make test-clusters`, minutes on two cores."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.processes import ROOT, read_records, roformer
from tests.integration.test_hosts import on_first_host
from tests.integration.test_resume import assert_same_curve, run
from tests.integration.test_slurm import by_step, log_of, submit_run, wait_for_steps
from tests.slurm import obstacle, slurm_cluster, start_sshd, wait_for

pytestmark = [
    pytest.mark.long,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.skipif(obstacle() is not None, reason=str(obstacle())),
]

LONGER = ("curriculum.stages.0.steps=100", "optimizer.lr=1e-4")
ENDLESS = ("curriculum.stages.0.steps=5000", "optimizer.lr=1e-4")
MLFLOW = "tracking.mlflow.uri=sqlite:///${run.dir}/mlflow.db"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("clusters") / "cluster", nodes=4) as running:
        start_sshd(running)
        yield running


@pytest.fixture
def submit(cluster, tiny_config, monkeypatch):
    return submit_run(cluster, tiny_config, monkeypatch)


def assert_nothing_runs(cluster) -> None:
    """Wait until no process but Slurm's own is on any node; name those that stay."""

    def left() -> dict[str, list[str]]:
        return {node: lines for node in cluster.names if (lines := cluster.processes(node))}

    try:
        wait_for("the nodes' last process", lambda: not left(), 60)
    except TimeoutError:
        assert left() == {}


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (4, 1)])
def test_nodes_and_ranks_have_the_curve_of_one_rank(cluster, submit, tiny_config, nodes, ranks):
    job, folder = submit(f"launch.nodes={nodes}", f"launch.num_processes={ranks}", *LONGER)
    assert cluster.wait(job, timeout_s=900)["JobState"] == "COMPLETED", log_of(folder)
    assert_nothing_runs(cluster)
    assert_same_curve(by_step(folder), run(tiny_config, "one", 1, *LONGER))


def test_srun_alone_starts_ranks_by_node_and_by_task(cluster, tiny_config, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    out = cluster.run(
        *("srun", "--nodes=2", "--ntasks=4", sys.executable, "-m", "launch.train", tiny_config),
        *("curriculum.stages.0.steps=1",),
    )
    assert "(2 rows x 1 accumulated x 4 ranks)" in out
    assert (tiny_config.parent / "runs" / "tiny" / "done").exists()


def test_doctor_asks_all_hosts_and_names_the_one_out_of_reach(cluster, tiny_config, tmp_path):
    hosts = tmp_path / "hosts"
    doctor = [sys.executable, "-m", "launch.cli", "doctor", tiny_config, "--hostfile", hosts]
    hosts.write_text("n1 slots=1\nn2 slots=1\n")
    code, out = on_first_host(cluster, *doctor)
    assert code == 0, out
    for expected in ("n1", "n2", "eth0", "all-reduce", " ms", "the run would start"):
        assert expected in out
    hosts.write_text("n1 slots=1\nn9 slots=1\n")
    code, out = on_first_host(cluster, *doctor)
    assert code == 2, out
    assert "would fail: n9: " in out


def test_a_real_time_limit_cuts_a_run_into_slices_of_one_curve(cluster, submit, tiny_config):
    from mlflow import MlflowClient

    limits = ("launch.slurm.time=2:00", "launch.slurm.signal_s=30")
    long = ("curriculum.stages.0.steps=3000", "optimizer.lr=1e-5")
    job, folder = submit("launch.nodes=2", *long, *limits, "checkpoint.every_steps=0", MLFLOW)
    ended = cluster.wait(job, timeout_s=1200)
    assert ended["JobState"] == "COMPLETED", log_of(folder)
    assert int(ended["Restarts"]) >= 1
    assert len(read_records(folder)) == 3007
    assert_same_curve(by_step(folder), run(tiny_config, "one", 1, *long))
    client = MlflowClient(f"sqlite:///{folder.parent}/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "roformer"]
    (tracked,) = client.search_runs([experiment.experiment_id])
    assert tracked.info.status == "FINISHED"
    assert len(client.get_metric_history(tracked.info.run_id, "train/loss")) == 3007


def test_a_job_preempted_by_a_higher_partition_saves_and_comes_back(cluster, submit):
    job, folder = submit("launch.nodes=4", "curriculum.stages.0.steps=150")
    wait_for_steps(cluster, job, folder, 3)
    cluster.run("srun", "--partition=high", "--nodes=4", "--exclusive", "sleep", "1")
    ended = cluster.wait(job, timeout_s=900)
    assert ended["JobState"] == "COMPLETED", log_of(folder)
    assert ended["Restarts"] == "1"
    steps = [record["step"] for record in read_records(folder)]
    assert steps == list(range(1, 158))


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
    assert_nothing_runs(cluster)


def test_an_array_of_two_seeds_is_a_study(cluster, submit):
    seeds = ("compare.seeds=[1,2]", "run.name=seeds", MLFLOW)
    job, folder = submit("--array", "seeds", *seeds)
    wait_for("both seeds", lambda: len(list(folder.glob("*/done"))) == 2, 900)
    assert sorted(path.name for path in folder.glob("*-seed*")) == ["rope-seed1", "rope-seed2"]
    one, two = (by_step(folder / f"rope-seed{n}") for n in (1, 2))
    assert one[1]["data/hash"] != two[1]["data/hash"]
    logs = sorted(path.name for path in folder.glob("slurm-*.log"))
    assert logs == [f"slurm-{job}_0.log", f"slurm-{job}_1.log"]


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
    assert_nothing_runs(cluster)


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("n1 slots=1\nn2 slots=1\n")
    return path


def test_deepspeeds_own_hostfile_start_over_ssh(cluster, tiny_config, hostfile):
    deepspeed = Path(sys.executable).parent / "deepspeed"
    words = [deepspeed, "--hostfile", hostfile, "--module", "launch.train", tiny_config]
    code, out = on_first_host(cluster, *words)
    assert code == 0, out
    run_folder = tiny_config.parent / "runs" / "tiny"
    assert (run_folder / "done").exists(), out
    assert "rank 1 on n2" in (run_folder / "logs" / "rank-00001.log").read_text()


def test_the_same_script_started_on_each_host_needs_no_ssh(cluster, tiny_config, hostfile):
    command = [sys.executable, "-m", "launch.cli", "launch", tiny_config, "--hostfile", hostfile]
    code, text = on_first_host(cluster, *command)
    assert code == 0, text
    script = hostfile.with_name("job.sh")
    script.write_text(text)
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    second = cluster.on("n2", "bash", str(script), "1")
    with subprocess.Popen(second, env=environment, stdout=subprocess.DEVNULL) as other:
        code, out = on_first_host(cluster, "bash", script, "0")
        assert code == 0, out
        assert other.wait(60) == 0
    assert (tiny_config.parent / "runs" / "tiny" / "done").exists(), out
