"""Starts the ranks of a run on this machine through DeepSpeed's launcher, and reads how it ended.

Launchers lose exit codes (DeepSpeed's returns 0 when a rank is killed by a signal), so the markers
in the run's folder decide. They also take half a minute a rank to end the others of one that died,
so once a rank has failed, the rest is ended from here.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console

from configs.loader import load
from configs.schema import Config
from launch.environment import RANKS
from launch.errors import EXIT_BAD_INPUT, EXIT_OK, EXIT_PREEMPTED, Failed
from launch.preflight import local_processes, prepare
from launch.run_folder import DONE, PARENT, PULSES, REQUEUE, STARTED, STOP, folder_of, is_done
from trainer.distributed import free_port
from trainer.liveness import Onlooker, clear, first_failure, has_failures
from trainer.preemption import Preempted, release_signals

FAILED_S = 10.0
"""How long the other ranks may go on once one has failed: to say why they end, too."""


def train_here(path: Path, overrides: Sequence[str], console: Console) -> int:
    """Check a config, then train it with all ranks of this machine; return the exit code."""
    config = load(path, overrides)
    processes = local_processes(config)
    prepare(config, processes)
    folder = folder_of(config)
    if is_done(config):
        console.print(f"{folder} is finished; remove it to train again, or choose another run.name")
        return EXIT_OK
    code = spawn(config, path, overrides, processes=processes)
    if code == EXIT_OK:
        report = f"roformer report {shlex.quote(str(folder))}"
        console.print(f"finished: {folder}; `{report}` draws its curves")
    return code


def rank_command(
    path: Path, overrides: Sequence[str], *, processes: int, module: str = "launch.train"
) -> list[str]:
    """Return the command that starts `processes` ranks on this machine."""
    rank = [module, str(path), *overrides]
    if processes == 1:
        return [sys.executable, "-m", *rank]
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "error"]
    place = [f"--num_gpus={processes}", f"--master_port={free_port()}", "--no_local_rank"]
    return [*launcher, *place, "--module", *rank]


def rank_environment(processes: int) -> dict[str, str]:
    """Return the ranks' environment: a share of the cores for each, and the kind of device."""
    cores = len(os.sched_getaffinity(0))
    defaults = {"OMP_NUM_THREADS": str(max(1, cores // processes))}
    if not torch.cuda.is_available():
        defaults["DS_ACCELERATOR"] = "cpu"  # or deepspeed's launcher warns that it found no GPU
    own = {PARENT: str(os.getpid()), STARTED: str(time.time()), RANKS: str(processes)}
    return defaults | os.environ | own


def spawn(config: Config, path: Path, overrides: Sequence[str], *, processes: int) -> int:
    """Run `processes` ranks to their end.

    Raises:
        Preempted: If it was asked to stop before they were started.
        Failed: If they end without the run being finished or preempted.
    """
    folder = folder_of(config)
    folder.mkdir(parents=True, exist_ok=True)
    for marker in (DONE, REQUEUE, STOP):
        (folder / marker).unlink(missing_ok=True)
    clear(folder / PULSES)
    if signal.sigpending() & {signal.SIGTERM, signal.SIGUSR1}:
        (folder / REQUEUE).touch()
        raise Preempted("asked to stop before it has started")
    command = rank_command(path, overrides, processes=processes)
    # In a session of their own: what a terminal or a scheduler sends to our whole process group
    # reaches us alone, and we ask all ranks to stop after the same step.
    release_signals()
    with _asking_to_stop(folder) as asked:
        launched = subprocess.Popen(
            command, env=rank_environment(processes), start_new_session=True
        )
        asked.session = launched.pid
        code = _wait(launched, folder, grace_s=config.checkpoint.grace_seconds, asked=asked)
    (folder / STOP).unlink(missing_ok=True)  # where it came too late
    if (folder / DONE).exists():
        return EXIT_OK
    if (folder / REQUEUE).exists():
        return EXIT_PREEMPTED
    failure = first_failure(folder / PULSES)
    if code == EXIT_BAD_INPUT and failure is None:
        return code  # a rank has said what is wrong
    if failure is not None and failure.traceback:
        print(f"{failure.traceback}\nroformer: so failed {failure}", file=sys.stderr)
    raise Failed(
        f"{config.run.name} ended before it was finished: "
        f"{failure or f'the launcher has exited with {code}'}; start again to go on from the last "
        "checkpoint"
    )


@dataclass
class _Asked:
    """Whether we were asked to stop, and whom to pass it on to."""

    session: int | None = None
    since: float | None = None


@contextmanager
def _asking_to_stop(folder: Path) -> Iterator[_Asked]:
    """Turn signals to us into the file that asks all ranks to stop."""
    asked = _Asked()

    def ask(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and asked.since is not None:
            _kill(asked.session)
            return
        asked.since = asked.since or time.monotonic()
        try:
            (folder / STOP).touch()
        except OSError:  # a full disk
            if asked.session is not None:
                os.killpg(asked.session, signal.SIGTERM)
        again = "; Ctrl-C again ends it at once" if number == signal.SIGINT else ""
        print(f"roformer: asked to stop: saving after this step{again}", file=sys.stderr)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    old = {number: signal.signal(number, ask) for number in signals}
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _wait(launched: subprocess.Popen[bytes], folder: Path, *, grace_s: float, asked: _Asked) -> int:
    """Wait for a launcher and its ranks, and end by force what outlives its time.

    Ranks may take `FAILED_S` once one of them has failed, and twice `grace_s` (they end themselves
    after one) once they are asked to stop, as they are where the launcher dies before them.
    """
    failed_since: float | None = None
    onlooker = Onlooker(folder / PULSES)
    while launched.poll() is None or _has_processes(launched.pid):
        now = time.monotonic()
        onlooker.look()
        if launched.poll() is not None and asked.since is None:
            asked.since = now
            (folder / STOP).touch()
        if failed_since is None and has_failures(folder / PULSES):
            failed_since = now
        has_failed = failed_since is not None and now - failed_since > FAILED_S
        if has_failed or (asked.since is not None and now - asked.since > 2 * grace_s):
            _kill(launched.pid)
        time.sleep(0.2)
    return launched.returncode


def _kill(session: int | None) -> None:
    if session is not None:
        with suppress(ProcessLookupError):
            os.killpg(session, signal.SIGKILL)


def _has_processes(session: int) -> bool:
    """Whether a process of this session runs; one that has ended but was not reaped does not."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = status.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue  # it has just ended
        if int(its_session) == session and state != "Z":
            return True
    return False
