import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer import liveness
from trainer.distributed import World
from trainer.liveness import (
    Liveness,
    Onlooker,
    clear,
    first_failure,
    has_failures,
    tell,
    tell_of_error,
)

RANK = """
import sys, time
from pathlib import Path
from trainer import liveness
from types import SimpleNamespace
liveness.BEAT_S, liveness.SILENT_S, liveness.STUCK_S = 0.1, 0.5, 0.5
rank = int(sys.argv[2])
world = SimpleNamespace(rank=rank, size=2)
with liveness.Liveness(Path(sys.argv[1]), world, timeout_s=60) as alive:
    alive.see_others()
    alive.pulse("training")
    alive.pulse("training")
    for _ in range(600 if len(sys.argv) < 4 else 10):
        alive.pulse("training")
        time.sleep(0.01)
    def stuck_here(): time.sleep(60)
    stuck_here() if len(sys.argv) > 3 else None
"""


def start(folder: Path, rank: int, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", RANK, str(folder), str(rank), *more]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("number", "cause"), [(signal.SIGSTOP, "is stopped (SIGSTOP)"), (signal.SIGKILL, "was killed")]
)
def test_the_next_rank_names_one_that_is_frozen_or_killed(tmp_path, number, cause):
    first, second = start(tmp_path, 0), start(tmp_path, 1)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("0000[01].json"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(second.pid, number)
    assert second.wait(120) == -signal.SIGKILL  # freed, and ended, by the first
    assert first.wait(120) == 1
    failure = first_failure(tmp_path)
    assert failure is not None
    assert failure.rank == 1
    assert cause in failure.cause
    assert f"process {second.pid}" in failure.cause


def test_whoever_started_the_ranks_sees_that_the_only_one_is_frozen(tmp_path, monkeypatch):
    monkeypatch.setattr(liveness, "BEAT_S", 0.1)
    monkeypatch.setattr(liveness, "SILENT_S", 1.0)
    onlooker, process = Onlooker(tmp_path), start(tmp_path, 0)
    deadline = time.monotonic() + 120
    while not (tmp_path / "00000.json").exists():
        assert time.monotonic() < deadline
        onlooker.look()
    process.send_signal(signal.SIGSTOP)
    while not has_failures(tmp_path):
        assert time.monotonic() < deadline
        onlooker.look()
        time.sleep(0.02)
    failure = first_failure(tmp_path)
    process.kill()
    process.wait()
    assert failure is not None
    assert failure.rank == 0
    assert f"process {process.pid} has not answered" in failure.cause
    assert "it is stopped (SIGSTOP)" in failure.cause


def test_time_in_which_the_onlooker_was_frozen_itself_is_not_held_against_a_rank(
    tmp_path, monkeypatch
):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    beat = {"rank": 0, "host": socket.gethostname(), "pid": os.getpid(), "phase": "training"}
    (tmp_path / "00000.json").write_text(json.dumps(beat))
    onlooker = Onlooker(tmp_path)
    for now[0] in (0.1, 1000.1, 2000.1):
        onlooker.look()
    assert not has_failures(tmp_path)
    for second in range(40):
        now[0] = 3000.0 + second
        onlooker.look()
    assert has_failures(tmp_path)


def test_a_full_disk_stops_no_pulse(tmp_path, monkeypatch):
    """The next rank takes it for silence else."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(liveness, "BEAT_S", 0.02)
    with Liveness(tmp_path, World(0, 1, 0), timeout_s=60):
        pulse = tmp_path / "00000.json"
        monkeypatch.setattr(liveness, "_write", refuse)
        time.sleep(0.1)  # a beat that had begun
        seen = {liveness._beat_of(pulse)}
        deadline = time.monotonic() + 120
        while len(seen) < 3:
            assert time.monotonic() < deadline
            seen.add(liveness._beat_of(pulse))
    assert len({beat.splitlines()[0] for beat in seen}) == 1  # it could not write what it does


def test_a_rank_that_is_stuck_ends_itself_and_says_where(tmp_path):
    stuck = start(tmp_path, 0, "stuck")
    assert stuck.wait(120) == 1
    failure = first_failure(tmp_path)
    assert failure is not None
    assert "no progress" in failure.cause
    assert "stuck_here" in failure.traceback


def test_the_first_failure_is_that_which_others_follow_from(tmp_path):
    tell(tmp_path, 0, "lost its peer", is_consequence=True)
    tell(tmp_path, 2, "an error", "the traceback")
    tell(tmp_path, 3, "a later one")
    tell(tmp_path, 2, "what came after")
    failure = first_failure(tmp_path)
    assert failure is not None
    assert (failure.rank, failure.cause, failure.traceback) == (2, "an error", "the traceback")
    clear(tmp_path)
    assert not has_failures(tmp_path)
    assert first_failure(tmp_path) is None


def test_a_rank_that_ends_well_leaves_nothing_and_one_that_vanishes_is_found(tmp_path):
    with Liveness(tmp_path, World(0, 1, 0), timeout_s=60):
        beat = json.loads((tmp_path / "00000.json").read_text())
        assert beat["pid"] == os.getpid()
        assert not has_failures(tmp_path)
    assert not list(tmp_path.iterdir())
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / "00000.json").write_text(json.dumps(beat | {"pid": ended.pid}))
    assert has_failures(tmp_path)
    failure = first_failure(tmp_path)
    assert failure is not None
    assert "SIGKILL" in failure.cause


def test_an_error_is_told_in_a_line_with_its_traceback(tmp_path):
    try:
        raise RuntimeError("two\nlines")
    except RuntimeError as error:
        tell_of_error(tmp_path, 1, error)
    failure = first_failure(tmp_path)
    assert failure is not None
    assert failure.cause == "RuntimeError: two lines"
    assert "Traceback" in failure.traceback
    assert not failure.is_consequence
    assert liveness.SILENT_S + 20 < 60  # named, ended and cleared away within a minute


def test_a_machine_that_has_too_much_to_run_gets_time(tmp_path, monkeypatch):
    def exit_with(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", exit_with)
    rank = Liveness(tmp_path, World(0, 1, 0), timeout_s=600)
    rank.pulse("training")
    rank.pulse("training")
    rank._since -= 1.5 * liveness.STUCK_S
    cores = os.cpu_count()
    for load, is_ended in ((0.1, True), (6.0, False), (2.0, True)):  # processes a core
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load * cores, 0.0, 0.0))
        if is_ended:
            with pytest.raises(SystemExit):
                rank._look_at_main()
        else:
            rank._look_at_main()


WAITS = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from trainer import liveness
liveness.BEAT_S, liveness.SILENT_S = 0.05, 0.2
world = SimpleNamespace(rank=1, size=3)
words = lambda: print("last words", file=sys.stderr, flush=True)
with liveness.Liveness(Path(sys.argv[1]), world, timeout_s=0.5, last_words=words):
    time.sleep(60)
"""


def test_ranks_that_do_not_come_are_named(tmp_path):
    earlier = tmp_path / "00002.json"
    earlier.write_text('{"rank": 2}')
    os.utime(earlier, (1e9, 1e9))
    done = subprocess.run(
        [sys.executable, "-c", WAITS, str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    waiting, gave_up, *rest = done.stderr.splitlines()
    assert waiting == "roformer: waiting for ranks 0, 2, not started"
    assert gave_up.startswith("roformer: rank 1: no progress for ")
    assert gave_up.endswith(" s while starting: ranks 0, 2, not started")
    assert rest == ["", "last words"]
