"""Checks across sections. A check's parameters name the sections it reads.

Each yields (key, what is wrong and what to do). A check runs whenever the sections it names could
be read, so that one load reports everything that is wrong with a file.
"""

from collections.abc import Callable, Iterator

from configs.schema import LaunchConfig
from data_pipeline.config import DataConfig
from model.config import ModelConfig
from trainer.config import CurriculumConfig, EngineConfig, EvaluationConfig, ScheduleConfig

Problems = Iterator[tuple[str, str]]


def lengths_fit_positions(
    curriculum: CurriculumConfig, evaluation: EvaluationConfig, model: ModelConfig
) -> Problems:
    """Every length must be one that the positions can tell apart."""
    if model.positions == "none":
        return
    for key, seq_len in _lengths(curriculum, evaluation):
        if seq_len > model.max_positions:
            yield (
                key,
                f"{seq_len} is over the {model.max_positions} positions that {model.positions} "
                f"holds; set model.max_positions={seq_len} or shorten the rows",
            )


def lengths_fit_device(
    curriculum: CurriculumConfig, evaluation: EvaluationConfig, engine: EngineConfig
) -> Problems:
    """One row at least must fit a device's micro-batch."""
    for key, seq_len in _lengths(curriculum, evaluation):
        if seq_len > engine.device_tokens:
            yield (
                key,
                f"a row of {seq_len} tokens is over engine.device_tokens={engine.device_tokens}; "
                f"set engine.device_tokens={seq_len} or more",
            )


def batches_divide(curriculum: CurriculumConfig, launch: LaunchConfig) -> Problems:
    """Every rank takes the same number of rows."""
    if launch.num_processes == "auto":
        return
    world = launch.num_processes * launch.nodes
    for number, stage in enumerate(curriculum.stages):
        if stage.global_batch % world:
            lower = stage.global_batch // world * world
            choices = " or ".join(str(n) for n in (lower, lower + world) if n > 0)
            yield (
                f"curriculum.stages.{number}.global_batch",
                f"{stage.global_batch} rows don't divide over {_ranks(launch)}; take {choices}",
            )


def lanes_divide(data: DataConfig, launch: LaunchConfig) -> Problems:
    """Every loader worker of every rank owns the same number of lanes."""
    if launch.num_processes == "auto":
        return
    world = launch.num_processes * launch.nodes
    readers = world * max(data.workers, 1)
    if data.lanes % readers:
        yield (
            "data.lanes",
            f"{data.lanes} lanes don't divide over {world} ranks x "
            f"{max(data.workers, 1)} loader workers; take a multiple of {readers}",
        )


def mixtures_name_sources(curriculum: CurriculumConfig, data: DataConfig) -> Problems:
    """A stage can weigh only what `data.train` lists, and must leave something."""
    names = [source.name for source in data.sources if source.name]
    for number, stage in enumerate(curriculum.stages):
        key = f"curriculum.stages.{number}.mixture"
        for name in stage.mixture or {}:
            if name not in names:
                known = ", ".join(names) or "none, for it is a single source"
                yield key, f"{name!r} is no source of data.train, whose names are: {known}"
        if stage.mixture is not None and not any(stage.mixture.values()):
            yield key, "gives no source a weight above 0"


def _ranks(launch: LaunchConfig) -> str:
    """Name the keys that make the number of ranks."""
    per_machine = f"launch.num_processes={launch.num_processes}"
    return f"launch.nodes={launch.nodes} x {per_machine}" if launch.nodes > 1 else per_machine


def schedule_fits(schedule: ScheduleConfig, curriculum: CurriculumConfig) -> Problems:
    """Warm-up and decay must lie within the schedule's length."""
    whole = curriculum.total_steps if schedule.unit == "steps" else curriculum.total_tokens
    total = whole if schedule.total is None else schedule.total
    if schedule.warmup > total:
        yield (
            "schedule.warmup",
            f"{schedule.warmup} {schedule.unit} of warm-up are over the {total} of the whole "
            f"schedule; take less than {total}",
        )
    elif schedule.decay is not None and schedule.warmup + schedule.decay > total:
        yield (
            "schedule.decay",
            f"warm-up {schedule.warmup} + decay {schedule.decay} are over the {total} "
            f"{schedule.unit} of the whole schedule",
        )


def _lengths(
    curriculum: CurriculumConfig, evaluation: EvaluationConfig
) -> Iterator[tuple[str, int]]:
    """Yield every length of rows, with its key."""
    for number, stage in enumerate(curriculum.stages):
        yield f"curriculum.stages.{number}.seq_len", stage.seq_len
    if evaluation.seq_len is not None:
        yield "evaluation.seq_len", evaluation.seq_len


CHECKS: tuple[Callable[..., Problems], ...] = (
    lengths_fit_positions,
    lengths_fit_device,
    batches_divide,
    lanes_divide,
    mixtures_name_sources,
)
"""Each problem of theirs rests on the keys that it names."""

CHECKS_OF_WHOLE_SECTIONS: tuple[Callable[..., Problems], ...] = (schedule_fits,)
"""These rest on all keys of their sections, so they run only where all of them are right."""
