"""`roformer profile`: where the time of a config's training steps goes, on the ranks it asks for.

The steps are real ones, of data, model and engine as `roformer train` would build them; no run
folder is made and nothing is saved but the trace.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from configs.loader import load
from configs.schema import Config
from launch.assembly import DTYPES, build_trainer
from launch.errors import EXIT_OK, Failed, exit_code
from launch.preflight import local_processes, prepare
from launch.run_folder import unwritable
from launch.spawn import rank_command, rank_environment
from trainer.curriculum import Stage
from trainer.distributed import share_cores, world_from_environment
from trainer.engine import init_distributed
from trainer.loop import Trainer
from trainer.metrics import StepResult, measure_matmul_peak
from trainer.preemption import StopRequest
from trainer.profiling import OTHER, PARTS, Breakdown, break_down, named_parts

WARM_UP = 2
"""Steps before those that are profiled: allocators, optimizer state, compilation."""


def profile_here(
    path: Path,
    overrides: Sequence[str],
    console: Console,
    *,
    steps: int,
    stage: str | None,
    trace: Path | None,
) -> int:
    """Check a config, then profile it with all ranks of this machine; return the exit code."""
    config = load(path, overrides)
    processes = local_processes(config)
    prepared = prepare(config, processes, new_run=False)
    find_stage(prepared.stages, stage)
    trace = trace or Path(config.run.dir) / f"{config.run.name}.trace.json.gz"
    if (obstacle := unwritable(trace.parent)) is not None:
        raise ValueError(f"--trace {trace}: {obstacle} is no folder that can be written to")
    if steps < 1:
        raise ValueError(f"--steps {steps}: at least 1 is needed")
    options = [f"--steps={steps}", f"--trace={trace}", *([f"--stage={stage}"] if stage else [])]
    command = rank_command(
        path, [*overrides, *options], processes=processes, module="launch.profiling"
    )
    if code := subprocess.run(command, env=rank_environment(processes)).returncode:
        raise Failed(
            f"profiling ended with exit code {code}; the first failing rank says why above"
        )
    console.print(f"trace: {trace} (chrome://tracing, or ui.perfetto.dev)")
    return EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    """Profile as one rank; return the process's exit code."""
    parser = argparse.ArgumentParser(prog="launch.profiling", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--stage")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_intermixed_args(argv)
    return exit_code(
        lambda: profile_rank(
            load(arguments.config, arguments.overrides),
            steps=arguments.steps,
            stage=arguments.stage,
            trace=arguments.trace,
        )
    )


def profile_rank(config: Config, *, steps: int, stage: str | None, trace: Path) -> int:
    """Train `steps` steps of a stage under the profiler; the first rank prints and saves."""
    world = world_from_environment()
    share_cores(world)
    prepared = prepare(config, world.size, new_run=False)
    init_distributed(world, timeout_s=config.engine.timeout_s)
    with TemporaryDirectory() as folder:
        trainer = build_trainer(prepared, world, StopRequest(Path(folder) / "stop"), None, None)
        chosen = find_stage(trainer.stages, stage)
        peaks = [measure_matmul_peak(trainer.engine.device, DTYPES[config.engine.precision])]
        breakdown, results = measure(trainer, chosen, steps, trace if world.is_first else None)
        peaks += [measure_matmul_peak(trainer.engine.device, DTYPES[config.engine.precision])]
        peak = max(peaks)  # a machine that others use has better and worse moments
        if world.is_first:
            flops = sum(
                trainer.recorder.flops(r.lengths, round(r.targets / world.size)) for r in results
            )
            console = Console(highlight=False, soft_wrap=True)
            console.print(
                f"profile: {config.run.name}, stage {chosen.name}, {steps} steps of "
                f"{chosen.step_tokens:,} tokens, rank 0 of {world.size}, "
                f"ZeRO-{config.engine.zero_stage}, {config.engine.precision}"
            )
            console.print(
                f"{OTHER}: residual sums, dropout, copies, Python; matmul peak: "
                f"{peak / 1e9:,.0f} GFLOP/s, the better of before and after"
            )
            console.print(table(breakdown, results, flops=flops, peak=peak))
    torch.distributed.destroy_process_group()
    return EXIT_OK


def find_stage(stages: Sequence[Stage], name: str | None) -> Stage:
    """Return the stage of this name, or the first."""
    for stage in stages:
        if name in (None, stage.name):
            return stage
    names = ", ".join(stage.name for stage in stages)
    raise ValueError(f"--stage {name}: the curriculum has {names}")


def measure(
    trainer: Trainer, stage: Stage, steps: int, trace: Path | None
) -> tuple[Breakdown, list[StepResult]]:
    """Train some steps under the profiler, and sort what they took into parts."""
    on_device = trainer.engine.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_device
    with trainer.enter(stage) as (factors, rows):
        for _ in range(WARM_UP):
            trainer.train_step(stage, factors, rows)
        with (
            named_parts(trainer.engine.module, trainer.engine),
            profile(activities=activities, with_flops=True, record_shapes=True) as profiler,
        ):
            made = [trainer.train_step(stage, factors, rows) for _ in range(steps)]
            results = [result for result in made if result is not None]
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
    return break_down(profiler.events() or [], on_device=on_device), results


def table(breakdown: Breakdown, results: Sequence[StepResult], *, flops: int, peak: float) -> Table:
    """Show the parts of a step, the longest first, and what is left of it."""
    steps, whole = len(results), sum(result.seconds for result in results)
    parts = {**breakdown.seconds, "data": sum(result.waited_s for result in results)}
    named = {part: seconds for part, seconds in parts.items() if part in PARTS}
    rows = sorted(named.items(), key=lambda row: -row[1])
    rows.append((OTHER, whole - sum(named.values())))
    shown = Table(header_style="bold")
    shown.add_column("part", no_wrap=True)
    for name in ("ms a step", "share"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("of the matmul peak", justify="right", no_wrap=True)
    for part, seconds in rows:
        rate = breakdown.matmul_flops / seconds / peak if part == "matmul" and seconds else 0.0
        shown.add_row(
            part,
            f"{1e3 * seconds / steps:,.1f}",
            f"{seconds / whole:.1%}",
            f"{rate:.0%}" if rate else "",
        )
    shown.add_section()
    shown.add_row("step", f"{1e3 * whole / steps:,.1f}", "100%", f"MFU {flops / whole / peak:.0%}")
    return shown


if __name__ == "__main__":
    sys.exit(main())
