"""Settings of training: objective, curriculum, optimizer, schedule, engine, evaluation, tracking.

Torch-free, so that a config is checked in a fraction of a second. Each section checks its own
fields; checks across sections stand in `configs.checks`.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
)

PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A config section: frozen, and every unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )
    set_elsewhere: ClassVar[dict[str, str]] = {}
    """Keys that people look for here, and where they are set."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, what is wrong and what to do) for this section's own fields."""
        yield from ()


class ObjectiveConfig(Section):
    """What the model learns to predict."""

    kind: Literal["mlm", "causal"] = "mlm"
    mask_rate: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of tokens chosen as targets (mlm): 80% [MASK], 10% random, 10% kept."""
    whole_word: bool = True
    """Choose whole words: every piece of a chosen word is a target (mlm)."""


class StageConfig(Section):
    """One stage of the curriculum: a length and a batch, held for a number of steps."""

    name: Annotated[str, Field(min_length=1)]
    seq_len: PositiveInt
    """Tokens a row."""
    global_batch: PositiveInt
    """Rows a step, over all ranks and accumulation."""
    steps: PositiveInt
    lr: PositiveFloat | None = None
    """Peak learning rate within this stage; null keeps `optimizer.lr`."""
    mask_rate: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Overrides `objective.mask_rate` within this stage."""
    mixture: dict[str, NonNegativeFloat] | None = None
    """Weights of the sources in `data.train` by name, others 0; null keeps theirs."""


class CurriculumConfig(Section):
    """The stages, in order; lengths and batches may go up and down."""

    stages: Annotated[list[StageConfig], Field(min_length=1)]

    def problems(self) -> Iterator[tuple[str, str]]:
        """Stage names are keys of the report: they must differ."""
        seen: dict[str, int] = {}
        for number, stage in enumerate(self.stages):
            if stage.name in seen:
                yield (
                    f"stages.{number}.name",
                    f"{stage.name!r} is also the name of stage {seen[stage.name]}; "
                    "give every stage its own name",
                )
            seen.setdefault(stage.name, number)

    @property
    def total_steps(self) -> int:
        """Steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    @property
    def total_tokens(self) -> int:
        """Tokens of all stages (rows are always full)."""
        return sum(s.steps * s.global_batch * s.seq_len for s in self.stages)


class OptimizerConfig(Section):
    """AdamW; norms, biases and embeddings stand outside weight decay."""

    lr: PositiveFloat = 1e-4
    """Peak learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: PositiveFloat = 1e-6
    weight_decay: NonNegativeFloat = 0.01
    clip_norm: NonNegativeFloat = 1.0
    """Largest 2-norm of the whole gradient; 0 turns clipping off."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Adam's averages need betas below 1."""
        for index, beta in enumerate(self.betas):
            if beta >= 1:
                yield f"betas.{index}", f"{beta} must be below 1"


class ScheduleConfig(Section):
    """Learning rate over the whole run; stages don't restart it."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    unit: Literal["steps", "tokens"] = "steps"
    """What `warmup`, `decay` and `total` count."""
    warmup: NonNegativeInt = 0
    """Linear rise from 0 to the peak."""
    total: PositiveInt | None = None
    """Where the decay ends; null: the end of the curriculum."""
    decay: PositiveInt | None = None
    """Length of the final linear decay (wsd only)."""
    final_ratio: Fraction = 0.0
    """Learning rate at the end of the decay, as a share of the peak."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """`decay` belongs to wsd and to wsd only."""
        if self.kind == "wsd" and self.decay is None:
            yield "decay", f"wsd needs the length of its decay, in {self.unit}"
        if self.kind != "wsd" and self.decay is not None:
            yield "decay", f"only wsd has it, and schedule.kind is {self.kind}; remove it"


class ZeroKeys(Section):
    """DeepSpeed's `zero_optimization`, but for what `engine` sets."""

    set_elsewhere: ClassVar[dict[str, str]] = {
        "stage": "engine.zero_stage",
        "offload_optimizer": "engine.offload",
        "cpu_offload": "engine.offload",
    }

    contiguous_gradients: bool | None = None
    reduce_scatter: bool | None = None
    reduce_bucket_size: PositiveInt | None = None
    allgather_partitions: bool | None = None
    allgather_bucket_size: PositiveInt | None = None
    overlap_comm: bool | None = None
    round_robin_gradients: bool | None = None
    sub_group_size: PositiveInt | None = None
    prefetch_bucket_size: NonNegativeInt | None = None
    stage3_prefetch_bucket_size: NonNegativeInt | None = None
    param_persistence_threshold: NonNegativeInt | None = None
    stage3_param_persistence_threshold: NonNegativeInt | None = None
    max_live_parameters: PositiveInt | None = None
    stage3_max_live_parameters: PositiveInt | None = None
    max_reuse_distance: PositiveInt | None = None
    stage3_max_reuse_distance: PositiveInt | None = None
    zero_hpz_partition_size: PositiveInt | None = None
    zero_quantized_weights: bool | None = None
    zero_quantized_gradients: bool | None = None
    log_trace_cache_warnings: bool | None = None


class Bf16Keys(Section):
    """DeepSpeed's `bf16`, but for `enabled`."""

    set_elsewhere: ClassVar[dict[str, str]] = {"enabled": "engine.precision"}

    immediate_grad_update: bool | None = None
    check_grad_overflow: bool | None = None


class Fp16Keys(Section):
    """DeepSpeed's `fp16`: its loss scale."""

    set_elsewhere: ClassVar[dict[str, str]] = {"enabled": "engine.precision"}

    loss_scale: NonNegativeFloat | None = None
    initial_scale_power: NonNegativeInt | None = None
    loss_scale_window: PositiveInt | None = None
    hysteresis: PositiveInt | None = None
    consecutive_hysteresis: bool | None = None
    min_loss_scale: PositiveFloat | None = None


class DataTypeKeys(Section):
    """DeepSpeed's `data_types`."""

    grad_accum_dtype: Literal["fp32", "fp16", "bf16"] | None = None


class CommsLoggerKeys(Section):
    """DeepSpeed's `comms_logger`."""

    enabled: bool | None = None
    verbose: bool | None = None
    prof_all: bool | None = None
    debug: bool | None = None
    prof_ops: list[str] | None = None


class DeepSpeedKeys(Section):
    """Keys that are handed to DeepSpeed as they are; null leaves its default.

    DeepSpeed takes an unknown key at its top level in silence, so the ones that can matter to this
    trainer are named here, with their types.
    """

    set_elsewhere: ClassVar[dict[str, str]] = {
        "train_batch_size": "curriculum.stages.N.global_batch",
        "train_micro_batch_size_per_gpu": "engine.device_tokens",
        "gradient_accumulation_steps": "engine.device_tokens",
        "gradient_clipping": "optimizer.clip_norm",
        "optimizer": "the section optimizer",
        "scheduler": "the section schedule",
        "activation_checkpointing": "engine.activation_checkpointing",
        "curriculum_learning": "curriculum.stages",
        "data_efficiency": "curriculum.stages",
    }

    zero_optimization: ZeroKeys = Field(default_factory=ZeroKeys)
    bf16: Bf16Keys = Field(default_factory=Bf16Keys)
    fp16: Fp16Keys = Field(default_factory=Fp16Keys)
    data_types: DataTypeKeys = Field(default_factory=DataTypeKeys)
    comms_logger: CommsLoggerKeys = Field(default_factory=CommsLoggerKeys)
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = None
    steps_per_print: PositiveInt | None = None
    wall_clock_breakdown: bool | None = None
    memory_breakdown: bool | None = None
    dump_state: bool | None = None

    @model_serializer(mode="wrap")
    def _only_what_is_set(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without_nulls(dump(self))


def _without_nulls(keys: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is null, and blocks that are empty then."""
    kept = {k: _without_nulls(v) if isinstance(v, dict) else v for k, v in keys.items()}
    return {key: value for key, value in kept.items() if value not in (None, {})}


class EngineConfig(Section):
    """How a step is computed: DeepSpeed ZeRO, precision, memory. Never changes the curve."""

    zero_stage: Annotated[int, Field(ge=0, le=3)] = 2
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    device_tokens: PositiveInt = 8192
    """Largest number of tokens in a micro-batch of one device."""
    offload: Literal["none", "optimizer"] = "none"
    """Where the optimizer's state lives: on the device, or in host memory (ZeRO 1 to 3)."""
    activation_checkpointing: bool = False
    """Recompute layers in the backward pass instead of keeping their activations."""
    compile: bool = False
    """Fuse what a layer does after attention by torch.compile (a C++ compiler, or Triton)."""
    logits_mib: PositiveInt = 512
    """Largest fp32 logits in hand at a time; more targets are taken in parts."""
    timeout_s: PositiveInt = 600
    """Longest wait of one rank for the others before the job ends."""
    deepspeed: DeepSpeedKeys = Field(default_factory=DeepSpeedKeys)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Offload moves a partitioned optimizer, so it needs ZeRO."""
        if self.offload == "optimizer" and self.zero_stage == 0:
            yield "offload", "optimizer offload needs engine.zero_stage 1, 2 or 3, and it is 0"


class EvaluationConfig(Section):
    """Held-out loss: every target once, whatever the world."""

    every_steps: NonNegativeInt = 0
    """Steps between evaluations, besides the one at each stage's end; 0: only those."""
    seq_len: PositiveInt | None = None
    """Tokens a row when evaluating; null: the stage's own (curves then jump at stage ends)."""


class TrainerConfig(Section):
    """What training puts up with."""

    max_bad_steps: PositiveInt = 10
    """Steps in a row with a loss or gradient that is no number, each skipped, that end the run."""


class CheckpointConfig(Section):
    """When a run is saved, how much is kept, and from where it goes on."""

    every_steps: NonNegativeInt = 1000
    """Steps between saves, besides the one at the end; 0: only at the end."""
    keep: PositiveInt = 2
    """Newest checkpoints that stay."""
    keep_every: NonNegativeInt = 0
    """Those of each multiple of so many steps stay as well; 0: none."""
    on_error: Literal["stop", "go_on"] = "stop"
    """When the disk refuses one: end the run, or train on and try again at the next."""
    resume: Annotated[str, Field(min_length=1)] = "auto"
    """auto: the newest complete one; never: refuse a folder that has any; or a folder's path."""
    allow_changes: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Keys or sections that shape the curve, and may differ from the last start's even so."""
    grace_seconds: PositiveInt = 60
    """Longest time from a request to stop to the end of the run, the save included."""


class MlflowConfig(Section):
    """Where MLflow keeps the curves."""

    uri: str | None = "sqlite:///${run.dir}/mlflow.db"
    """Tracking store or server; null turns it off."""
    experiment: Annotated[str, Field(min_length=1)] = "roformer"
    run_name: str | None = None
    """What the run is called there, by ${...} of other keys; null: its folder's name."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Further tags of the run."""
    system_metrics: bool = False
    """Log the first host's processors, memory, disk, network and GPUs as well."""
    parent_run_id: str | None = None
    """The study's run, set by `roformer compare`."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """A config goes into run folders: no place for a password."""
        address = (self.uri or "").partition("://")[2].partition("/")[0]
        if "@" in address and not (self.uri or "").startswith("sqlite:"):
            yield (
                "uri",
                "holds a user or password; set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, in the environment",
            )


class TrackingConfig(Section):
    """How often metrics are written, and who is told."""

    every_steps: PositiveInt = 10
    """Steps between two lines of metrics.jsonl."""
    mlflow: MlflowConfig = Field(default_factory=MlflowConfig)
