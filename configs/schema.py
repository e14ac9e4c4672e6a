"""The whole configuration: one section a field, each beside the package that it configures."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from data_pipeline.config import CorpusConfig, DataConfig, TokenizerConfig
from model.config import ModelConfig
from trainer.config import (
    CheckpointConfig,
    CurriculumConfig,
    EngineConfig,
    EvaluationConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ScheduleConfig,
    Section,
    TrackingConfig,
    TrainerConfig,
)


def _seconds(value: Any) -> Any:
    """Read [DAYS-]HOURS:MINUTES:SECONDS, as Slurm writes it."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]?\d):([0-5]?\d)", str(value))
    if match is None:
        return value
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((24 * days + hours) * 60 + minutes) * 60 + seconds


Seconds = Annotated[PositiveInt, BeforeValidator(_seconds)]


class RunConfig(Section):
    """What a run is called, where it lives, and the seed of everything random in it."""

    name: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """The run's folder is `dir`/`name`."""
    dir: Annotated[str, Field(min_length=1)] = "runs"
    """Folder of runs."""
    seed: NonNegativeInt = 17
    """Initial weights, order of samples, masks, dropout."""
    batch_hash: bool = False
    """Log a hash of every global batch (`data/hash`), and every step with it."""
    time_limit: Seconds | None = None
    """Wall clock of one start, seconds or [DAYS-]HOURS:MINUTES:SECONDS: it saves before that."""


class LaunchConfig(Section):
    """How many processes train."""

    num_processes: PositiveInt | Literal["auto"] = 1
    """Ranks on this machine; never more than it has GPUs, where it has any. auto: every GPU."""


ARM_SECTIONS = ("model", "optimizer", "schedule", "engine")
"""What arms may differ in and still see the same rows, masks and stages."""


class CompareConfig(Section):
    """A paired study: the same run, but for each arm's overrides."""

    arms: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_]*$")], list[str]] = Field(
        default_factory=lambda: {
            "rope": ["model.positions=rope"],
            "learned": ["model.positions=learned"],
        }
    )
    """key=value overrides by arm; the first arm is the treatment, the last one the baseline."""
    seeds: list[NonNegativeInt] = Field(default_factory=list)
    """Each arm is trained with each of them; empty: `run.seed`."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """A comparison needs two arms; a seed counts once."""
        if len(self.arms) < 2:
            yield "arms", f"a comparison needs two arms or more, and here is {len(self.arms)}"
        for arm, overrides in self.arms.items():
            for override in overrides:
                if override.partition(".")[0] not in ARM_SECTIONS:
                    yield (
                        f"arms.{arm}",
                        f"{override} would unpair the arms; an arm may set keys of "
                        + ", ".join(ARM_SECTIONS),
                    )
        if len(set(self.seeds)) < len(self.seeds):
            yield "seeds", f"{self.seeds} names a seed twice"


class Config(Section):
    """Everything a command needs; made by `configs.loader.load`."""

    run: RunConfig
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    corpus: CorpusConfig = Field(default_factory=CorpusConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    curriculum: CurriculumConfig
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    compare: CompareConfig = Field(default_factory=CompareConfig)
