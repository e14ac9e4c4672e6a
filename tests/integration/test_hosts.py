"""Runs on two hosts of a hostfile, over ssh and without, each with a network of its own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.processes import read_records
from tests.integration.test_resume import assert_same_curve, run
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
    setting = 'launch.environment.GREETING=it\'s "a,b" = [c]'
    command = launch(tiny_config, hostfile, "--submit", "run.name=two", setting)
    code, out = on_first_host(cluster, *command)
    assert code == 0, out
    folder = tiny_config.parent / "runs" / "two"
    assert "on n2, pid" in (folder / "logs" / "rank-00001.log").read_text()
    got = {record["step"]: record for record in read_records(folder)}
    assert_same_curve(got, run(tiny_config, "one", 1))
    assert not [line for line in cluster.processes("n2") if "launch" in line]


def test_a_host_out_of_reach_is_named_before_anything_starts(cluster, tiny_config, hostfile):
    hostfile.write_text("n1 slots=1\nn9 slots=1\n")
    code, out = on_first_host(cluster, *launch(tiny_config, hostfile, "--submit"))
    assert code == 2, out
    assert "n9: not reached by ssh" in out
    assert "n1:" not in out
    assert not (tiny_config.parent / "runs").exists()
