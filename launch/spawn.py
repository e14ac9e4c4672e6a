"""Starts the ranks of a run on this machine through DeepSpeed's launcher, and reads how it ended.

Launchers lose exit codes (DeepSpeed's returns 0 when a rank is killed by a signal), so the markers
in the run's folder decide.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console

from configs.loader import load
from configs.schema import Config
from launch.errors import EXIT_BAD_INPUT, EXIT_OK, EXIT_PREEMPTED, Failed
from launch.preflight import local_processes, prepare
from launch.run_folder import DONE, REQUEUE, folder_of, is_done
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
        console.print(f"finished: {folder}; `roformer report {folder}` draws its curves")
    return code


def rank_command(path: Path, overrides: Sequence[str], *, processes: int) -> list[str]:
    """Return the command that starts `processes` ranks on this machine."""
    rank = ["launch.train", str(path), *overrides]
    if processes == 1:
        return [sys.executable, "-m", *rank]
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "warning"]
    place = [f"--num_gpus={processes}", f"--master_port={free_port()}", "--no_local_rank"]
    return [*launcher, *place, "--module", *rank]


def spawn(config: Config, path: Path, overrides: Sequence[str], *, processes: int) -> int:
    """Run `processes` ranks to their end.

    Raises:
        Failed: If they end without the run being finished or preempted.
    """
    folder = folder_of(config)
    for marker in (DONE, REQUEUE):
        (folder / marker).unlink(missing_ok=True)
    command = rank_command(path, overrides, processes=processes)
    cores = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // processes)))
    launched = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": threads})

    def pass_on(number: int, frame: FrameType | None) -> None:
        launched.send_signal(signal.SIGTERM)

    old = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        code = launched.wait()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    if (folder / DONE).exists():
        return EXIT_OK
    if (folder / REQUEUE).exists():
        return EXIT_PREEMPTED
    if code == EXIT_BAD_INPUT:
        return code  # a rank has said what is wrong
    raise Failed(
        f"{config.run.name} ended before it was finished (the launcher's exit code is {code}); "
        "the first failing rank says why above; start again to go on from the last checkpoint"
    )
