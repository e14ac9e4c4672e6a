import os
import signal
import subprocess
import sys

from trainer.preemption import StopRequest


def test_a_signal_a_file_and_the_end_of_the_parent_ask_to_stop(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert StopRequest(tmp_path / "stop", ended.pid).requested
    assert not StopRequest(tmp_path / "stop", os.getpid()).requested
    request = StopRequest(tmp_path / "stop")
    assert not request.requested
    (tmp_path / "stop").touch()
    assert request.requested
    (tmp_path / "stop").unlink()
    old = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    try:
        request.install()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert request.requested
    finally:
        signal.signal(signal.SIGTERM, old[0])
        signal.signal(signal.SIGUSR1, old[1])
