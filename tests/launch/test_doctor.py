import re
import socket

import pytest

from configs.loader import load
from launch.cli import main
from launch.doctor import Answer, judge
from launch.preflight import prepare
from launch.probe import port_problems, room_problems, stale_locks

FACTS = {
    "versions": {"python": "3.11.9", "torch": "2.13.0", "deepspeed": "0.19.8", "git": "abc"},
    "gpus": ["H100"] * 8,
    "locks": [],
    "problems": [],
}


def answer(host: str, *, reduced=None, failure=None, **facts) -> Answer:
    found = {} if failure else FACTS | facts
    return Answer(host, found, {"seconds": 0.1, "time": 50.0} | (reduced or {}), failure)


def test_equal_hosts_have_nothing_to_say():
    assert judge([answer("n1"), answer("n2")]) == ([], [])


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (
            {"versions": FACTS["versions"] | {"torch": "2.12.0"}},
            "torch is 2.12.0, and 2.13.0 on n1",
        ),
        ({"problems": ["run.dir: / is no folder"]}, "run.dir: / is no folder"),
        ({"reduced": {"failed": "Connection refused"}}, "no all-reduce: Connection refused"),
        ({"failure": "ssh: no route to host"}, "ssh: no route to host"),
    ],
)
def test_what_would_stop_the_run_names_its_host(other, problem):
    warnings, problems = judge([answer("n1"), answer("n2", **other)])
    assert problems == [f"n2: {problem}"]
    assert not warnings


@pytest.mark.parametrize(
    ("other", "warning"),
    [
        ({"gpus": ["A100"] * 8}, "other GPUs than n1"),
        ({"reduced": {"time": 90.0}}, "its clock differs from n1's by 40 s"),
        ({"locks": ["/x/lock"]}, "/x/lock makes every build of that op wait"),
    ],
)
def test_what_only_hurts_is_a_note(other, warning):
    warnings, problems = judge([answer("n1"), answer("n2", **other)])
    assert len(warnings) == 1
    assert warnings[0].startswith("n2: ")
    assert warning in warnings[0]
    assert not problems


def test_a_port_in_use_is_told():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (problem,) = port_problems(port)
        assert f"port {port}" in problem
    assert port_problems(port) == []


@pytest.mark.parametrize(
    ("change", "problem"), [({"memory": 2**29}, "memory: a rank takes"), ({"disk": 1}, "disk: 9 ")]
)
def test_too_little_memory_or_disk_is_told(tiny_config, change, problem):
    prepared = prepare(load(tiny_config), 2)
    room = {"gpus": [], "memory": 2**40, "disk": 2**40}
    assert list(room_problems(prepared, 2, 2, room)) == []
    (found,) = room_problems(prepared, 2, 2, room | change)
    assert found.startswith(problem)


def test_locks_of_builds_are_found(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert stale_locks() == []
    (tmp_path / "py311_cpu" / "fused_adam").mkdir(parents=True)
    lock = tmp_path / "py311_cpu" / "fused_adam" / "lock"
    lock.touch()
    assert stale_locks() == [lock]


def test_this_host_is_asked_and_what_would_fail_ends_in_2(tiny_config, capfd):
    words = ["data.train=nowhere", "run.name=probed", "launch.num_processes=2"]
    assert main(["doctor", str(tiny_config), *words]) == 2
    out = capfd.readouterr().out
    assert f"would fail: {socket.gethostname()}: " in out
    assert "nowhere" in out
    assert "free /dev/shm" in out
    assert re.search(r"all-reduce, 16 MiB +│ +\d+\.\d ms", out)
    assert not (tiny_config.parent / "runs" / "probed").exists()
    assert not list((tiny_config.parent / "runs").iterdir())
