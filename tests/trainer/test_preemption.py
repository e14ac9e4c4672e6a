import os
import signal
import subprocess
import sys
import time

from trainer.preemption import StopRequest


def test_a_file_and_the_end_of_the_parent_ask_to_stop(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert StopRequest(tmp_path / "stop", ended.pid).requested
    assert not StopRequest(tmp_path / "stop", os.getpid()).requested
    request = StopRequest(tmp_path / "stop")
    assert not request.requested
    (tmp_path / "stop").touch()
    assert request.requested


WAITS = """
import sys, time
from pathlib import Path
from trainer.preemption import Interrupted, StopRequest, hold_signals
import trainer.preemption
hold_signals()
trainer.preemption.WAKE_S = 0.2
stop = StopRequest(Path(sys.argv[1]), grace_s=float(sys.argv[2]))
print("held", flush=True)
sys.stdin.readline()
stop.install()
try:
    with stop.interrupting():
        time.sleep(60)
except Interrupted:
    print("woken", stop.requested, flush=True)
if len(sys.argv) > 3:
    time.sleep(60)
"""


def start_waiting(*arguments: object) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_signal_before_the_start_is_kept_and_wakes_a_wait_and_makes_the_file(tmp_path):
    process = start_waiting(tmp_path / "stop", 60)
    process.send_signal(signal.SIGTERM)  # while torch would be imported
    output, _ = process.communicate("\n", timeout=60)
    assert output == "woken True\n"
    assert process.returncode == 0
    assert (tmp_path / "stop").exists()  # so that all other ranks hear of it


def test_the_file_wakes_a_wait(tmp_path):
    process = start_waiting(tmp_path / "stop", 60)
    (tmp_path / "stop").touch()
    output, _ = process.communicate("\n", timeout=60)
    assert output == "woken True\n"


def test_what_outlives_its_grace_is_ended_by_force(tmp_path):
    process = start_waiting(tmp_path / "stop", 0.6, "goes on")
    (tmp_path / "stop").touch()
    _, errors = process.communicate("\n", timeout=60)
    assert process.returncode == 1
    assert "checkpoint.grace_seconds=0.6" in errors


def test_the_clock_asks(tmp_path):
    assert StopRequest(tmp_path / "stop", deadline=time.time() - 1).requested
    assert not StopRequest(tmp_path / "stop", deadline=time.time() + 60).requested
