"""One rank of a training run, and the composition root: where a run is put together.

    deepspeed --module launch.train CONFIG.yaml [key=value ...]
    torchrun -m launch.train CONFIG.yaml [key=value ...]
    srun python -m launch.train CONFIG.yaml [key=value ...]

`roformer train` checks the config and starts this module, once a rank.
"""

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed
from rich.console import Console

from configs.loader import ConfigError
from launch.agreement import agree, attempt
from launch.environment import adopt, check_ranks
from launch.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK, Failed, exit_code
from launch.preflight import Prepared, fingerprints
from launch.rank_log import RankLog
from launch.run_folder import (
    DONE,
    PARENT,
    REQUEUE,
    STOP,
    folder_of,
    lock_folder,
    open_folder,
    write_text,
)
from model.flops import training_flops
from model.heads import LanguageModel
from model.initialize import initialize
from model.linear_attention import redraw
from trainer import checkpoint
from trainer.distributed import World, in_world, share_cores, world_from_environment
from trainer.engine import Engine, init_distributed
from trainer.loop import Data, Diverged, Settings, Trainer
from trainer.metrics import MetricsFile, Recorder, measure_matmul_peak, sources_read
from trainer.objectives import build_objective
from trainer.preemption import Preempted, StopRequest
from trainer.progress import Progress
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
        Failed: When the loss is not finite.
        ConfigError: When the config, or what it names, is not right; `Told` where many ranks are.
    """
    adopt(os.environ)
    has_launcher = in_world()
    world = world_from_environment()
    mine = attempt(path, overrides, world)
    if mine.config is not None:
        config = mine.config
        check_ranks(world.size, config.launch, os.environ)
        parent = os.environ.get(PARENT)
        stop = StopRequest(folder_of(config) / STOP, int(parent) if parent else None)
        stop.install()
        log.open(folder_of(config), world)
    if world.size == 1 and mine.problems:
        raise ConfigError(mine.problems)
    share_cores(world)
    level = logging.WARNING if world.is_first else logging.ERROR
    logging.basicConfig(level=level, format="roformer: %(message)s")
    init_distributed(world, timeout_s=mine.timeout_s)
    prepared = agree(mine, world)
    console = Console(stderr=True, soft_wrap=True) if world.is_first else None
    try:
        with recording(prepared, world, console) as metrics:
            build_trainer(prepared, world, stop, metrics, console).fit()
    except Preempted:
        if not has_launcher:
            raise
    except Diverged as error:
        raise Failed(str(error)) from None
    torch.distributed.destroy_process_group()
    return EXIT_OK


def build_trainer(
    prepared: Prepared,
    world: World,
    stop: StopRequest,
    metrics: MetricsFile | None,
    console: Console | None,
) -> Trainer:
    """Put a run together from its config, going on from its checkpoint if there is one."""
    config, tokenizer = prepared.config, prepared.tokenizer
    objective = partial(build_objective, config.objective, tokenizer, config.run.seed)
    causal = objective(config.objective.mask_rate).causal
    saved = checkpoint.load(prepared.checkpoint) if prepared.checkpoint else None
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
        model.load_state_dict(saved.weights)
    engine = Engine(
        model,
        engine=config.engine,
        optimizer=config.optimizer,
        world=world,
        max_accumulation=max(factors.accumulation for factors in prepared.factors),
    )
    if saved is not None:
        engine.restore_state(saved.tensors, saved.optimizer_steps)
    progress = Progress(config.run.name, prepared.stages[-1].last_step, console=console)
    progress.say(f"goes on from {saved.folder}" if saved else "starts afresh")
    return Trainer(
        settings=Settings(
            seed=config.run.seed,
            batch_hash=config.run.batch_hash,
            schedule=config.schedule,
            engine=config.engine,
            evaluation=config.evaluation,
            checkpoint=config.checkpoint,
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
        state=saved.state if saved else TrainState(),
        checkpoints=folder_of(config) / "checkpoints",
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
    folder = open_folder(config, {**facts, "world": world.size})
    lock = lock_folder(folder)
    tracker = Tracker(folder, config.tracking.mlflow)
    tracker.start()
    status: Status = "FAILED"
    try:
        with lock, MetricsFile(folder / "metrics.jsonl") as metrics:
            yield metrics
        write_text(folder / DONE, "")
        status = "FINISHED"
    except Preempted:
        write_text(folder / REQUEUE, "")
        (folder / STOP).unlink(missing_ok=True)
        status = "KILLED"
        raise
    finally:
        if (missed := tracker.close(status)) is not None and console is not None:
            console.print(missed, style="yellow", highlight=False, markup=False)


if __name__ == "__main__":
    sys.exit(main())
