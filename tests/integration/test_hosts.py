"""Runs on two hosts of a hostfile, over ssh and without, each with a network of its own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.processes import read_records
from tests.integration.test_resume import assert_same_curve, run
from tests.integration.witness import add_environment, assert_came, make_witness
from tests.slurm import Cluster, obstacle, slurm_cluster, start_sshd

MISSING = [name for name in ("pdsh", "ssh", "sshd") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.xdist_group("slurm"),
    pytest.mark.skipif(
        bool(obstacle() or MISSING),
        reason=str(obstacle() or f"no {', '.join(MISSING)}: install pdsh and openssh-server"),
    ),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("hosts") / "cluster", nodes=2) as running:
        start_sshd(running)
        yield running


@pytest.fixture
def hostfile(tmp_path) -> Path:
    path = tmp_path / "hosts"
    path.write_text("n1 slots=1\nn2 slots=1\n")
    return path


def on_first_host(cluster: Cluster, *command: str | Path) -> tuple[int, str]:
    """Run a command on n1, as somebody who is logged in there; return its exit code and output."""
    clean = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin", "HOME": "/root"}
    done = subprocess.run(
        cluster.on("n1", *map(str, command)),
        env=clean | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout


def launch(config: Path, hostfile: Path, *arguments: str) -> list[str | Path]:
    command = [sys.executable, "-m", "launch.cli", "launch", config, "--hostfile", hostfile]
    return [*command, *arguments]


@pytest.mark.long
def test_two_hosts_over_ssh_have_the_curve_of_one_rank(cluster, tiny_config, hostfile):
    command = launch(tiny_config, hostfile, "--submit", "run.name=two")
    code, out = on_first_host(cluster, *command)
    assert code == 0, out
    folder = tiny_config.parent / "runs" / "two"
    assert "on n2, pid" in (folder / "logs" / "rank-00001.log").read_text()
    got = {record["step"]: record for record in read_records(folder)}
    assert_same_curve(got, run(tiny_config, "one", 1))
    cluster.wait_until_empty()


def test_a_host_out_of_reach_is_named_before_anything_starts(cluster, tiny_config, hostfile):
    hostfile.write_text("n1 slots=1\nn9 slots=1\n")
    code, out = on_first_host(cluster, *launch(tiny_config, hostfile, "--submit"))
    assert code == 2, out
    assert "n9: not reached by ssh" in out
    assert "n1:" not in out
    assert not (tiny_config.parent / "runs").exists()


@pytest.mark.long
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


@pytest.mark.long
def test_deepspeeds_own_hostfile_start_over_ssh(cluster, tiny_config, hostfile):
    deepspeed = Path(sys.executable).parent / "deepspeed"
    words = [deepspeed, "--hostfile", hostfile, "--module", "launch.train", tiny_config]
    code, out = on_first_host(cluster, *words)
    assert code == 0, out
    run_folder = tiny_config.parent / "runs" / "tiny"
    assert (run_folder / "done").exists(), out
    assert "rank 1 on n2" in (run_folder / "logs" / "rank-00001.log").read_text()


@pytest.mark.long
def test_the_same_script_started_on_each_host_needs_no_ssh(cluster, tiny_config, hostfile):
    code, text = on_first_host(cluster, *launch(tiny_config, hostfile))
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


@pytest.mark.long
def test_hosts_with_another_version_of_the_config_are_refused(cluster, tiny_config, hostfile):
    other = tiny_config.with_name("other.yaml")
    other.write_text(tiny_config.read_text().replace("lr: 0.001", "lr: 0.002"))
    assert other.read_text() != tiny_config.read_text()
    mount = cluster.on("n2", "mount", "--bind", str(other), str(tiny_config))
    subprocess.run(mount, check=True, capture_output=True)
    try:
        code, out = on_first_host(cluster, *launch(tiny_config, hostfile, "--submit"))
    finally:
        subprocess.run(cluster.on("n2", "umount", str(tiny_config)), check=True)
    assert "rank 1 (n2): optimizer.lr is 0.002, and 0.001 on rank 0 (n1)" in out, out
    assert "Traceback" not in out
    assert code != 0
    assert not (tiny_config.parent / "runs" / "tiny" / "config.yaml").exists()
    cluster.wait_until_empty()


@pytest.mark.long
def test_a_host_that_is_not_started_is_named_by_the_others(cluster, tiny_config, hostfile):
    code, text = on_first_host(cluster, *launch(tiny_config, hostfile, "engine.timeout_s=5"))
    assert code == 0, text
    script = hostfile.with_name("job.sh")
    script.write_text(text)
    code, out = on_first_host(cluster, "bash", script, "0")
    assert code != 0
    assert " while starting: rank 1, not started" in out
    cluster.wait_until_empty()


@pytest.mark.long
@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        (("n9", "n1"), "host=n9 was not reachable"),
        (("n1", "n9"), " while starting: rank 1, not started"),
    ],
    ids=("first", "second"),
)
def test_deepspeeds_own_start_ends_where_a_host_is_out_of_reach(
    cluster, tiny_config, hostfile, hosts, said
):
    """It asks the first host alone whether ssh reaches it; the rank that started misses another."""
    hostfile.write_text("".join(f"{host} slots=1\n" for host in hosts))
    deepspeed = Path(sys.executable).parent / "deepspeed"
    words = [deepspeed, "--hostfile", hostfile, "--module", "launch.train", tiny_config]
    code, out = on_first_host(cluster, *words, "engine.timeout_s=5")
    assert code != 0
    assert said in out, out
    cluster.wait_until_empty()


@pytest.mark.long
def test_ssh_hands_on_the_environment_exactly(cluster, tiny_config, hostfile, tmp_path):
    add_environment(tiny_config)
    python = f"launch.python={make_witness(tmp_path)}"
    code, out = on_first_host(cluster, *launch(tiny_config, hostfile, "--submit", python))
    assert code == 1, out
    assert_came(tmp_path, "n1", "n2")
