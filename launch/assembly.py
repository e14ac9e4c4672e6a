"""The composition root: where a run is put together from its config."""

from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console

from launch.preflight import Prepared
from launch.resume import find_checkpoint, load_weights, order_of
from launch.run_folder import CHECKPOINTS, folder_of
from model.flops import training_flops
from model.heads import LanguageModel
from model.initialize import initialize
from model.linear_attention import redraw
from trainer.bad_steps import BadSteps
from trainer.distributed import World
from trainer.engine import Engine
from trainer.loop import Data, Settings, Trainer
from trainer.metrics import MetricsFile, Recorder, measure_matmul_peak, sources_read
from trainer.objectives import build_objective
from trainer.preemption import StopRequest
from trainer.progress import Progress
from trainer.saving import Saver
from trainer.state import TrainState

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
