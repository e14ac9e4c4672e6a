import socket

import psutil
import pytest

from configs.schema import LaunchConfig
from launch.environment import (
    adopt,
    check_ranks,
    expected_ranks,
    first_host,
    interface_towards,
    rendezvous_port,
)
from launch.train import main as train_main

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "GLOO_SOCKET_IFNAME": "eth7",
}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def adopted(environment: dict[str, str]) -> dict[str, str]:
    environ = dict(environment)
    adopt(environ)
    return {name: environ[name] for name in TORCH if name in environ}


def test_srun_is_understood():
    assert adopted(STEP) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(rendezvous_port(77, 0)),
    }


def test_the_scripts_rendezvous_comes_first():
    given = {"MASTER_ADDR": "n9", "MASTER_PORT": "4444"}
    assert adopted(STEP | given).items() >= given.items()


@pytest.mark.parametrize(
    ("tasks", "node", "here"), [("2(x3),1", 3, 1), ("2(x3),1", 2, 2), ("4", 0, 4), ("1,3", 1, 3)]
)
def test_tasks_of_this_node(tasks, node, here):
    step = STEP | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node)}
    assert adopted(step)["LOCAL_WORLD_SIZE"] == str(here)


def test_a_rank_that_sees_one_gpu_takes_it():
    assert adopted(STEP | {"CUDA_VISIBLE_DEVICES": "0,1"})["LOCAL_RANK"] == "1"
    assert adopted(STEP | {"CUDA_VISIBLE_DEVICES": "1"})["LOCAL_RANK"] == "0"


def test_open_mpi_is_understood():
    found = adopted(OMPI)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("1", "2", "1")
    assert found["MASTER_ADDR"] == "127.0.0.1"
    with pytest.raises(ValueError, match="-x MASTER_ADDR=HOST"):
        adopted(OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


def test_torchruns_words_are_left_alone():
    torchrun = dict.fromkeys(TORCH, "1") | {"MASTER_ADDR": "127.0.0.1"}
    assert adopted(torchrun | STEP | OMPI) == torchrun


@pytest.mark.parametrize(
    "environment", [{}, {k: v for k, v in STEP.items() if k != "SLURM_STEP_ID"}]
)
def test_a_process_in_no_step_stands_alone(environment):
    assert adopted(environment) == {}


def test_a_step_of_one_task_stands_alone():
    assert adopted(STEP | {"SLURM_STEP_NUM_TASKS": "1"}) == {}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[1-4]", "n1"),
        ("gpu[07-09,12],login", "gpu07"),
        ("login,gpu[1-2]", "login"),
        ("rack[0-1]n[3,5]", "rack0n3"),
        ("a-b[1-2]", "a-b1"),
    ],
)
def test_first_host_of_slurms_list(nodes, first):
    assert first_host(nodes) == first


def test_ports_differ_from_job_to_job_and_from_start_to_start():
    ports = {rendezvous_port(job, restart) for job in range(100, 200) for restart in range(7)}
    assert len(ports) == 700
    assert all(20000 <= port < 30000 for port in ports)


def test_a_single_machine_needs_no_interface_and_several_get_one_that_is_up():
    assert interface_towards("127.0.0.1") is None
    name = interface_towards("host.invalid")
    if name is not None:
        assert psutil.net_if_stats()[name].isup
        families = {a.address for a in psutil.net_if_addrs()[name] if a.family == socket.AF_INET}
        assert not any(address.startswith("127.") for address in families)


ALONE = LaunchConfig()
FOUR = LaunchConfig(nodes=2, num_processes=2)


@pytest.mark.parametrize(
    ("size", "launch", "environment"),
    [
        (1, ALONE, {"ROFORMER_RANKS": "2"}),
        (4, ALONE, {"ROFORMER_RANKS": "2"}),
        (1, FOUR, {}),
        (1, LaunchConfig(num_processes=2), {}),
        (2, FOUR, {}),
        (1, ALONE, {"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2"}),
        (1, ALONE, {"SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "4"}),
        (2, ALONE, {"SLURM_JOB_NUM_NODES": "4"}),
    ],
)
def test_another_number_of_ranks_than_was_meant_is_refused(size, launch, environment):
    with pytest.raises(ValueError, match=rf"^{size} ranks? started"):
        check_ranks(size, launch, environment)


@pytest.mark.parametrize(
    ("size", "launch", "environment"),
    [
        (1, ALONE, {}),
        (8, ALONE, {}),
        (8, LaunchConfig(num_processes=4), {}),
        (1, LaunchConfig(num_processes="auto"), {}),
        (4, FOUR, {}),
        (2, FOUR, {"ROFORMER_RANKS": "2"}),
        (4, ALONE, STEP),
        (1, ALONE, {"ROFORMER_RANKS": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2"}),
        (1, ALONE, {"SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "1"}),
    ],
)
def test_the_number_that_was_meant_starts(size, launch, environment):
    check_ranks(size, launch, environment)


def test_a_hostfile_in_the_config_says_how_many_ranks_were_meant(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("n1 slots=2\nn2 slots=2\n")
    launch = LaunchConfig(hostfile=str(hosts))
    check_ranks(4, launch, {})
    check_ranks(1, launch, {"ROFORMER_RANKS": "1"})  # `roformer train`, on this machine
    with pytest.raises(ValueError, match=r"^1 rank started, and 4 were meant"):
        check_ranks(1, launch, {})  # deepspeed, without its list


@pytest.mark.parametrize(
    "environment",
    [
        STEP | {"SLURM_STEP_NUM_TASKS": "x"},
        STEP | {"SLURM_STEP_TASKS_PER_NODE": "2x3"},
        STEP | {"SLURM_NODEID": "-1"},
        OMPI | {"OMPI_COMM_WORLD_SIZE": ""},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "two"},
        {"RANK": "0", "WORLD_SIZE": "2.0"},
    ],
)
def test_a_launchers_number_that_is_none_is_named(environment):
    with pytest.raises(ValueError, match=r"the environment has \w+="):
        adopt(dict(environment))


def test_a_number_of_ranks_that_is_none_is_named():
    with pytest.raises(ValueError, match="ROFORMER_RANKS='many'"):
        expected_ranks(ALONE, {"ROFORMER_RANKS": "many"})


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "wrong", [{"RANK": "x"}, {"RANK": "2"}, {"WORLD_SIZE": "0"}, {"MASTER_PORT": "p"}]
)
def test_torchs_words_that_make_no_sense_end_in_one_line(tiny_config, monkeypatch, capfd, wrong):
    for name, value in (TORCHRUN | wrong).items():
        monkeypatch.setenv(name, value)
    assert train_main([str(tiny_config)]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert "the environment has " in error
    assert not (tiny_config.parent / "runs").exists()
