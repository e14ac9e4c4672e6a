"""One rank of a training run: it meets the others, agrees with them, trains, says how it ended.

    deepspeed --module launch.train CONFIG.yaml [key=value ...]
    torchrun -m launch.train CONFIG.yaml [key=value ...]
    srun python -m launch.train CONFIG.yaml [key=value ...]

`roformer train` checks the config and starts this module, once a rank.
"""

if __name__ == "__main__":  # from before the seconds that torch and deepspeed take
    from trainer.preemption import hold_signals

    hold_signals()

import argparse
import errno
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed
from rich.console import Console

from configs.loader import ConfigError
from configs.schema import Config
from launch.agreement import Attempt, agree, attempt
from launch.assembly import build_trainer
from launch.environment import adopt, check_ranks
from launch.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK, Failed, Told, exit_code
from launch.rank_log import RankLog
from launch.recording import recording
from launch.run_folder import PARENT, PULSES, STARTED, STOP, folder_of
from trainer.bad_steps import Diverged
from trainer.checkpoint import SaveFailed
from trainer.distributed import World, in_world, share_cores, world_from_environment
from trainer.engine import init_distributed
from trainer.liveness import Liveness, tell, tell_of_error
from trainer.preemption import Preempted, StopRequest


def main(argv: Sequence[str] | None = None) -> int:
    """Train as one rank; return the process's exit code."""
    parser = argparse.ArgumentParser(prog="launch.train", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_intermixed_args(argv)
    log = RankLog()
    code = EXIT_FAILED
    try:
        code = exit_code(lambda: train(arguments.config, arguments.overrides, log))
    except Exception:
        traceback.print_exc()
    if code in (EXIT_FAILED, EXIT_BAD_INPUT):
        log.repeat_last_lines()
    return code


def train(path: Path, overrides: Sequence[str], log: RankLog) -> int:
    """Train to the end of the curriculum.

    Returns:
        The exit code. A preempted rank that has a launcher returns 0, for a launcher ends the other
        ranks when one returns anything else; the marker `requeue` tells a script what happened.

    Raises:
        Preempted: When the only rank was asked to stop, after saving.
        Failed: When too many steps were no numbers, or the disk refused a checkpoint.
        ConfigError: When the config, or what it names, is not right; `Told` where many ranks are.
    """
    adopt(os.environ)
    has_launcher = in_world()
    world = world_from_environment()
    mine = attempt(path, overrides, world)
    if mine.config is not None:
        check_ranks(world.size, mine.config.launch, os.environ)
        stop = stop_request(mine.config)
        stop.install()
        log.open(folder_of(mine.config), world)
    if world.size == 1 and mine.problems:
        raise ConfigError(mine.problems)
    share_cores(world)
    level = logging.WARNING if world.is_first else logging.ERROR
    logging.basicConfig(level=level, format="roformer: %(message)s")
    if mine.config is None:
        init_distributed(world, timeout_s=mine.timeout_s)
        agree(mine, world)  # raises on all ranks
        raise AssertionError("a rank without a config has agreed")
    pulses = folder_of(mine.config) / PULSES
    try:
        with Liveness(
            pulses, world, timeout_s=mine.timeout_s, last_words=log.repeat_last_lines
        ) as liveness:
            train_watched(mine, world, stop, liveness)
    except Told:
        log.close()
        raise
    except Preempted:
        if not has_launcher:
            raise
    except BaseException as error:
        if (all_there_is := said_in_full(error, folder_of(mine.config))) is None:
            tell_of_error(pulses, world.rank, error)
            raise
        tell(pulses, world.rank, all_there_is)
        raise Failed(all_there_is) from None
    torch.distributed.destroy_process_group()
    return EXIT_OK


def said_in_full(error: BaseException, folder: Path) -> str | None:
    """Return the line of an error that needs no traceback: a full disk is no fault of the code."""
    if isinstance(error, Diverged | SaveFailed):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.filename or folder}: {os.strerror(error.errno)}; make room"
    return None


def train_watched(mine: Attempt, world: World, stop: StopRequest, liveness: Liveness) -> None:
    """Meet the other ranks, agree with them on the run, put it together and train it."""
    init_distributed(world, timeout_s=mine.timeout_s)
    liveness.see_others()
    prepared = agree(mine, world)
    console = Console(stderr=True, soft_wrap=True) if world.is_first else None
    with recording(prepared, world, console) as metrics:
        build_trainer(prepared, world, stop, metrics, console, liveness.pulse).fit()


def stop_request(config: Config) -> StopRequest:
    """Return what can ask this rank to stop: signals, the file, its starter's end, the clock."""
    parent, started, limit = os.environ.get(PARENT), os.environ.get(STARTED), config.run.time_limit
    grace_s = float(config.checkpoint.grace_seconds)
    deadline = None
    if limit is not None:
        begun = float(started) if started else time.time()
        deadline = begun + limit - min(grace_s, limit / 10)
    return StopRequest(
        folder_of(config) / STOP,
        int(parent) if parent else None,
        deadline=deadline,
        grace_s=grace_s,
    )


if __name__ == "__main__":
    sys.exit(main())
