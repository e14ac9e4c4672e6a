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


Word = Annotated[str, Field(pattern=r"^[^\s\x00-\x1f]+$")]
"""Text without blanks, as it stands behind a `=` of sbatch's options."""
Line = Annotated[str, Field(pattern=r"^[^\n\r\x00]+$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
SECRETS = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_USERNAME")
MARGIN_S = 60
"""Slurm may send the signal so much earlier than asked."""


class SlurmConfig(Section):
    """What `roformer launch --slurm` asks Slurm for; null leaves it to the site."""

    time: str | None = None
    """Time limit of a slice, in Slurm's forms: minutes, hours:minutes:seconds, days-hours ..."""
    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    gpus_per_node: NonNegativeInt = 0
    """0 asks for none."""
    cpus_per_task: PositiveInt | None = None
    mem: Word | None = None
    """Memory a node, as `64G`; 0: all of it."""
    signal_s: PositiveInt = 120
    """So long before the time limit the ranks are asked to save; more than a save takes."""
    max_requeues: NonNegativeInt = 100
    """A job that was requeued so often ends, saved."""
    array_limit: PositiveInt | None = None
    """Elements of an array that run at once; null: all."""
    options: list[Annotated[str, Field(pattern=r"^-[^\n\r\x00]+$")]] = Field(default_factory=list)
    """Further options of sbatch, each as it stands behind `#SBATCH`."""
    srun_options: list[Line] = Field(default_factory=list)
    """Further arguments of srun, one an item: `--container-image=...`."""

    @property
    def time_s(self) -> int | None:
        """The time limit in seconds; None where there is none.

        Raises:
            ValueError: If it is in none of Slurm's forms.
        """
        if self.time is None or self.time.upper() in ("UNLIMITED", "INFINITE", "-1"):
            return None
        form = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", self.time)
        if form is None:
            raise ValueError(self.time)
        days, *rest = form.groups()
        numbers = [int(number) for number in rest if number is not None]
        # minutes, minutes:seconds, hours:minutes:seconds; behind days-: hours first
        units = (3600, 60, 1) if days is not None or len(numbers) == 3 else (60, 1)
        return int(days or 0) * 86400 + sum(
            n * unit for n, unit in zip(numbers, units, strict=False)
        )

    def problems(self) -> Iterator[tuple[str, str]]:
        """A slice must last until its signal, and a while before."""
        try:
            limit = self.time_s
        except ValueError:
            yield (
                "time",
                f"{self.time!r} is none of Slurm's forms: minutes, minutes:seconds, "
                "hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds",
            )
            return
        if limit is not None and limit <= self.signal_s + MARGIN_S:
            yield (
                "time",
                f"{self.time} is {limit} s, and the signal comes up to {self.signal_s + MARGIN_S} "
                "s before its end (launch.slurm.signal_s, and a minute that Slurm takes): no time "
                "to train is left",
            )


class LaunchConfig(Section):
    """Where ranks run, and what each machine needs before it can run them."""

    num_processes: PositiveInt | Literal["auto"] = 1
    """Ranks on each machine; never more than it has GPUs, where it has any. auto: every GPU."""
    nodes: PositiveInt = 1
    """Machines of a Slurm job. Over 1, a start with any other number of ranks is refused."""
    hostfile: Annotated[str, Field(min_length=1)] | None = None
    """DeepSpeed's list of machines (`host slots=8`), for `roformer launch`."""
    setup: list[Line] = Field(default_factory=list)
    """Lines of bash that run on a machine before its ranks: `module load cuda/12.6`."""
    container: list[Line] = Field(default_factory=list)
    """Words that stand before python: [apptainer, exec, --nv, image.sif]."""
    python: Line | None = None
    """Its python; null: the one that runs `roformer launch`."""
    environment: dict[Variable, Annotated[str, Field(pattern=r"^[^\x00]*$")]] = Field(
        default_factory=dict
    )
    """Variables of every rank, exactly as they stand here."""
    slurm: SlurmConfig = Field(default_factory=SlurmConfig)

    def problems(self) -> Iterator[tuple[str, str]]:
        """A config is copied into run folders and to MLflow: no place for secrets."""
        for name in self.environment:
            if name in SECRETS:
                yield (
                    f"environment.{name}",
                    "is a secret, and a config goes into the run's folder; set it in your shell, "
                    "from where sbatch and srun hand it on",
                )


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
