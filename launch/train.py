"""One rank of a training run, and the composition root: where a run is put together.

    deepspeed --module launch.train CONFIG.yaml [key=value ...]
    torchrun -m launch.train CONFIG.yaml [key=value ...]
    srun python -m launch.train CONFIG.yaml [key=value ...]

`roformer train` checks the config and starts this module, once a rank.
"""

if __name__ == "__main__":  # from before the seconds that torch and deepspeed take
    from trainer.preemption import hold_signals

    hold_signals()

import argparse
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed
from rich.console import Console

from configs.loader import ConfigError
from configs.schema import Config
from launch.agreement import Attempt, agree, attempt
from launch.environment import adopt, check_ranks
from launch.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK, Failed, Told, exit_code
from launch.preflight import Prepared, fingerprints
from launch.rank_log import RankLog
from launch.resume import find_checkpoint, load_weights, order_of
from launch.run_folder import (
    CHECKPOINTS,
    DONE,
    PARENT,
    PULSES,
    REQUEUE,
    STARTED,
    STOP,
    changes,
    folder_of,
    lock_folder,
    open_folder,
    write_text,
)
from model.flops import training_flops
from model.heads import LanguageModel
from model.initialize import initialize
from model.linear_attention import redraw
from trainer.bad_steps import BadSteps, Diverged
from trainer.checkpoint import SaveFailed
from trainer.distributed import (
    World,
    in_world,
    share_cores,
    world_from_environment,
)
from trainer.engine import Engine, init_distributed
from trainer.liveness import Liveness, tell, tell_of_error
from trainer.loop import Data, Settings, Trainer
from trainer.metrics import MetricsFile, Recorder, measure_matmul_peak, sources_read
from trainer.objectives import build_objective
from trainer.preemption import Preempted, StopRequest
from trainer.progress import Progress
from trainer.saving import Saver
from trainer.state import TrainState
from trainer.tracking import Status, Tracker

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
        with Liveness(pulses, world, timeout_s=mine.timeout_s) as liveness:
            train_watched(mine, world, stop, liveness)
    except Told:
        log.close()
        raise
    except Preempted:
        if not has_launcher:
            raise
    except (Diverged, SaveFailed) as error:
        tell(pulses, world.rank, str(error))  # says all: no traceback
        raise Failed(str(error)) from None
    except BaseException as error:
        tell_of_error(pulses, world.rank, error)
        raise
    torch.distributed.destroy_process_group()
    return EXIT_OK


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


def build_trainer(
    prepared: Prepared,
    world: World,
    stop: StopRequest,
    metrics: MetricsFile | None,
    console: Console | None,
    pulse: Callable[[str], None] = lambda phase: None,
) -> Trainer:
    """Put a run together from its config, going on from its checkpoint if there is one."""
    config, tokenizer = prepared.config, prepared.tokenizer
    objective = partial(build_objective, config.objective, tokenizer, config.run.seed)
    causal = objective(config.objective.mask_rate).causal
    root = folder_of(config) / CHECKPOINTS
    saved, order = find_checkpoint(config), order_of(prepared)
    model = LanguageModel(
        config.model,
        vocab_size=tokenizer.vocab_size,
        causal=causal,
        checkpoint_layers=config.engine.activation_checkpointing,
        compile_layers=config.engine.compile,
        max_targets=max(1, config.engine.logits_mib * 2**20 // (4 * tokenizer.vocab_size)),
    )
    if saved is None:
        initialize(model, config.run.seed)
    else:
        load_weights(model, saved)
    engine = Engine(
        model,
        engine=config.engine,
        optimizer=config.optimizer,
        world=world,
        max_accumulation=max(factors.accumulation for factors in prepared.factors),
    )
    if saved is not None:
        engine.restore_state(saved.tensors, saved.optimizer_steps)
        engine.restore_loss_scale(saved.loss_scale)
    progress = Progress(config.run.name, prepared.stages[-1].last_step, console=console)
    progress.say(f"goes on from {saved.folder}" if saved else "starts afresh: no checkpoint yet")
    state = saved.state if saved else TrainState()
    if saved and saved.order != order:
        progress.say("other data, lanes or seed than the checkpoint's: reads them from the start")
        state.cursors.clear()
    return Trainer(
        settings=Settings(
            seed=config.run.seed,
            batch_hash=config.run.batch_hash,
            schedule=config.schedule,
            engine=config.engine,
            evaluation=config.evaluation,
        ),
        stages=prepared.stages,
        data=Data(
            train=prepared.train,
            eval=prepared.eval,
            lanes=config.data.lanes,
            workers=config.data.workers,
            objective=objective,
            eval_objective=objective(config.objective.mask_rate),
        ),
        engine=engine,
        world=world,
        state=state,
        saver=Saver(
            root,
            engine,
            world,
            config.checkpoint,
            order=order,
            saved_step=state.step,
            pulse=pulse,
        ),
        bad_steps=BadSteps(
            folder_of(config) / "bad_steps.jsonl",
            prepared.train,
            seed=config.run.seed,
            lanes=config.data.lanes,
            max_in_a_row=config.trainer.max_bad_steps,
            world=world,
        ),
        recorder=Recorder(
            metrics,
            every_steps=config.tracking.every_steps,
            device=engine.device,
            flops=partial(training_flops, config.model, tokenizer.vocab_size, causal=causal),
            peak_flops=measure_matmul_peak(engine.device, DTYPES[config.engine.precision]),
            sources=partial(sources_read, prepared.train, config.run.seed, config.data.lanes),
        ),
        progress=progress,
        stop=stop,
        redraw=partial(redraw, model, config.run.seed),
        pulse=pulse,
    )


@contextmanager
def recording(
    prepared: Prepared, world: World, console: Console | None
) -> Iterator[MetricsFile | None]:
    """Keep a run's folder while it trains: metrics, tracking, and the marker of how it ended.

    The first rank does this; the others get None.
    """
    if not world.is_first:
        yield None
        return
    config = prepared.config
    facts = fingerprints(prepared.tokenizer, prepared.train, prepared.eval)
    if console is not None:
        for change in changes(config, facts):
            console.print(
                f"{config.run.name}  changed since the last start: {change}",
                highlight=False,
                markup=False,
            )
    place = {"hosts": list(prepared.hosts), "slurm_job": os.environ.get("SLURM_JOB_ID")}
    folder = open_folder(config, {**facts, "world": world.size, **place})
    lock = lock_folder(folder)
    tracker = Tracker(folder, config.tracking.mlflow)
    tracker.start()
    status: Status = "FAILED"
    try:
        with lock, MetricsFile(folder / "metrics.jsonl") as metrics:
            yield metrics
        write_text(folder / DONE, "")
        (folder / STOP).unlink(missing_ok=True)  # it came too late
        status = "FINISHED"
    except Preempted:
        write_text(folder / REQUEUE, "")
        (folder / STOP).unlink(missing_ok=True)
        status = "KILLED"
        raise
    finally:
        # a scheduler's patience, or that of ranks which have failed, is shorter than a new store's
        timeout_s = None if status == "FINISHED" else 10.0
        if (missed := tracker.close(status, timeout_s)) is not None and console is not None:
            console.print(missed, style="yellow", highlight=False, markup=False)


if __name__ == "__main__":
    sys.exit(main())
