"""Starts the ranks of a run on this machine through DeepSpeed's launcher, and reads how it ended.

Launchers lose exit codes (DeepSpeed's returns 0 when a rank is killed by a signal), so the markers
in the run's folder decide.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console

from configs.loader import load
from configs.schema import Config
from launch.environment import RANKS
from launch.errors import EXIT_BAD_INPUT, EXIT_OK, EXIT_PREEMPTED, Failed
from launch.preflight import local_processes, prepare
from launch.run_folder import DONE, PARENT, REQUEUE, STOP, folder_of, is_done
from trainer.distributed import free_port


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
    return defaults | os.environ | {PARENT: str(os.getpid()), RANKS: str(processes)}


def spawn(config: Config, path: Path, overrides: Sequence[str], *, processes: int) -> int:
    """Run `processes` ranks to their end.

    Raises:
        Failed: If they end without the run being finished or preempted.
    """
    folder = folder_of(config)
    folder.mkdir(parents=True, exist_ok=True)
    for marker in (DONE, REQUEUE, STOP):
        (folder / marker).unlink(missing_ok=True)
    command = rank_command(path, overrides, processes=processes)
    # In a session of their own: what a terminal or a scheduler sends to our whole process group
    # reaches us alone, and we ask all ranks to stop after the same step.
    launched = subprocess.Popen(command, env=rank_environment(processes), start_new_session=True)

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and (folder / STOP).exists():
            os.killpg(launched.pid, signal.SIGKILL)
            return
        (folder / STOP).touch()
        again = "; Ctrl-C again ends it at once" if number == signal.SIGINT else ""
        print(f"roformer: asked to stop: saving after this step{again}", file=sys.stderr)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    old = {number: signal.signal(number, ask_to_stop) for number in signals}
    try:
        code = launched.wait()
        end_session(launched.pid)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    if (folder / DONE).exists():
        return EXIT_OK
    if (folder / REQUEUE).exists():
        return EXIT_PREEMPTED
    (folder / STOP).unlink(missing_ok=True)
    if code == EXIT_BAD_INPUT:
        return code  # a rank has said what is wrong
    raise Failed(
        f"{config.run.name} ended before it was finished (the launcher's exit code is {code}); "
        "the first failing rank says why above; start again to go on from the last checkpoint"
    )


def end_session(session: int, *, grace_s: float = 60.0) -> None:
    """Wait for what a launcher that died before its ranks has left; end it after `grace_s`."""
    deadline = time.monotonic() + grace_s
    while _has_processes(session) and time.monotonic() < deadline:
        time.sleep(0.1)
    if _has_processes(session):
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
