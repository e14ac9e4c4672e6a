"""`roformer plan`: a plan in words and a table, with the time on this machine or on another."""

import argparse
from collections.abc import Callable

import psutil
import torch
from rich.console import Console
from rich.table import Table

from configs.loader import ConfigError, load
from configs.schema import Config
from data_pipeline.tokenizers import load_tokenizer
from launch.calibrate import calibrate
from launch.devices import DEVICES, EFFICIENCY, step_seconds
from launch.errors import EXIT_BAD_INPUT, EXIT_OK
from launch.plan import USABLE, Plan, StagePlan, make_plan, smallest_change
from launch.preflight import local_processes, prepare
from trainer.metrics import measure_matmul_peak

ASSUMED_MFU = 0.4
Seconds = Callable[[StagePlan], float]
"""Time of a step of a stage."""


def plan(arguments: argparse.Namespace, console: Console) -> int:
    """Print what a config takes, whether it fits, and what it still lacks; return the exit code."""
    config = load(arguments.config, arguments.overrides)
    device = DEVICES[arguments.device] if arguments.device else None
    here = device is None and arguments.ranks is None
    world = arguments.ranks or local_processes(config) * config.launch.nodes
    try:
        vocab_size = load_tokenizer(config.tokenizer).vocab_size
    except (ValueError, OSError):
        vocab_size = config.tokenizer.vocab_size or 8000  # what is wrong is told at the end
    kind = "gpu" if device or torch.cuda.is_available() else "cpu"
    try:
        found = make_plan(config, world=world, vocab_size=vocab_size, kind=kind)
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    capacity = device.memory_gib * 2**30 if device else _memory_here(world if here else 1)
    if arguments.calibrate:
        seconds: Seconds = calibrate(arguments.config, arguments.overrides, config, console)
        how = "as measured by --calibrate"
    else:
        seconds, how = _rate(arguments, found)
    console.print(
        f"plan: {config.run.name}, {found.num_parameters / 1e6:,.1f} M parameters "
        f"(vocabulary {vocab_size:,}), {world} rank{'s' * (world > 1)}, "
        f"ZeRO-{config.engine.zero_stage}, {config.engine.precision}"
        + (f", {arguments.device}" if device else "")
    )
    console.print(_stage_table(found, seconds))
    console.print(_rank_table(found))
    _tell_memory(found, capacity, console)
    total = sum(row.stage.num_steps * seconds(row) for row in found.stages)
    console.print(
        f"{found.flops:.3g} FLOPs in all: about {_time(total)}, "
        f"{_count(found.flops / total / world)}FLOP/s a rank, {how}; evaluation and saving come "
        "on top"
    )
    problems = []
    if found.fullest.memory.device > USABLE * capacity:
        problems.append(_misfit(config, found, kind, capacity))
    try:
        prepare(config, world, new_run=False, here=here)
    except ConfigError as error:
        problems += error.problems
    for problem in problems:
        console.print(f"not ready: {problem}", style="yellow")
    return EXIT_BAD_INPUT if problems else EXIT_OK


def _memory_here(ranks: int) -> float:
    """Return the bytes of one rank's device here; ranks on CPUs share the machine's memory."""
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory)
    return psutil.virtual_memory().total / ranks


def _rate(arguments: argparse.Namespace, plan: Plan) -> tuple[Seconds, str]:
    """Return how long a step takes, and by what account."""
    world = plan.world
    if arguments.rate is not None:
        rate = arguments.rate * 1e12
        return lambda row: row.step_flops / (rate * world), f"at {arguments.rate:g} TFLOP/s a rank"
    precision = load(arguments.config, arguments.overrides).engine.precision
    if arguments.device is not None:
        device = DEVICES[arguments.device]

        def modelled(row: StagePlan) -> float:
            return step_seconds(
                device, flops=row.step_flops, sent=row.sent, world=world, precision=precision
            )

        return modelled, f"at {EFFICIENCY:.0%} of the peak and a ring's exchange"
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    peak = measure_matmul_peak(place, dtype) * (world if place.type == "cuda" else 1)
    how = f"at {ASSUMED_MFU:.0%} of the {peak / 1e9:,.0f} GFLOP/s that matmuls reach here now"
    return lambda row: row.step_flops / (peak * ASSUMED_MFU), how


def _tell_memory(plan: Plan, capacity: float, console: Console) -> None:
    row = plan.fullest
    memory = row.memory
    on_host = " on the host" if memory.offloaded else ""
    console.print(
        f"a rank holds weights {_gib(memory.weights)}, gradients {_gib(memory.gradients)}, "
        f"optimizer {_gib(memory.optimizer)}{on_host}, activations up to "
        f"{_gib(memory.activations)} (stage {row.stage.name}), runtime "
        f"{_gib(memory.runtime)}: {_gib(memory.device)} of "
        f"{_gib(capacity)}; a checkpoint takes {_gib(plan.checkpoint_bytes)}"
    )


def _misfit(config: Config, plan: Plan, kind: str, capacity: float) -> str:
    memory = plan.fullest.memory
    parts = {
        "activations": memory.activations,
        "optimizer": 0 if memory.offloaded else memory.optimizer,
        "gradients": memory.gradients,
        "weights": memory.weights,
    }
    largest = max(parts, key=lambda name: parts[name])
    found = smallest_change(
        config, world=plan.world, vocab_size=plan.vocab_size, kind=kind, capacity=capacity
    )
    way = (
        f"{found[0]} does, with {_gib(found[1].fullest.memory.device)}"
        if found
        else "no change of engine and no number of ranks that divides the batches does"
    )
    return (
        f"memory: stage {plan.fullest.stage.name} takes {_gib(memory.device)} a rank and "
        f"{_gib(USABLE * capacity)} fit, most of it {largest} ({_gib(parts[largest])}): {way}"
    )


def _stage_table(plan: Plan, seconds: Seconds) -> Table:
    table = Table(header_style="bold")
    table.add_column("stage")
    for name in ("length", "batch", "rows*acc*ranks", "steps", "tokens", "FLOPs", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in plan.stages:
        stage, factors = row.stage, row.factors
        table.add_row(
            stage.name,
            f"{stage.seq_len:,}",
            f"{stage.global_batch:,}",
            f"{factors.micro_batch}*{factors.accumulation}*{factors.world}",
            f"{stage.num_steps:,}",
            _count(stage.num_steps * stage.step_tokens).strip(),
            f"{row.flops:.2g}",
            _time(stage.num_steps * seconds(row)),
        )
    return table


def _rank_table(plan: Plan) -> Table:
    """Show what one rank holds and sends."""
    table = Table(header_style="bold")
    table.add_column("a rank, by stage")
    for name in ("activations", "memory in all", "sent a step"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in plan.stages:
        sent = _gib(row.sent) if row.sent else "0"
        sizes = (_gib(row.memory.activations), _gib(row.memory.device), sent)
        table.add_row(row.stage.name, *sizes)
    return table


def _count(number: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} "


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"


def _time(seconds: float) -> str:
    for unit, size in (("years", 31557600), ("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
