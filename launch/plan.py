"""What a config asks for, stage by stage, before anything is started.

Counted: batch factors, tokens, FLOPs (`model.flops`), parameters, memory (`launch.memory`), bytes
between ranks, checkpoint size. Where it does not fit, the smallest change that does is sought.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

import torch

from configs.schema import Config
from launch.devices import communication_bytes
from launch.memory import BYTES, Memory, activation_bytes, runtime_bytes, state_memory
from model.config import ModelConfig
from model.flops import training_flops
from model.heads import LanguageModel
from trainer.config import EngineConfig
from trainer.curriculum import Factors, Stage, batch_factors, build_stages

ALLOCATOR = {"cpu": 1.06, "gpu": 1.0}
"""What an allocator holds, for each byte in use; glibc's gives little back."""
USABLE = 0.95
"""Share of a device's memory that a plan may fill."""


@dataclass(frozen=True)
class StagePlan:
    """What one stage takes."""

    stage: Stage
    factors: Factors
    flops: int
    """Operations of the whole stage, all ranks."""
    memory: Memory
    """Of one rank."""
    sent: int
    """Bytes that one rank sends to others in a step."""

    @property
    def step_flops(self) -> float:
        """Operations of a step, all ranks."""
        return self.flops / self.stage.num_steps


@dataclass(frozen=True)
class Plan:
    """What a run takes."""

    world: int
    num_parameters: int
    vocab_size: int
    checkpoint_bytes: int
    stages: tuple[StagePlan, ...]

    @property
    def flops(self) -> int:
        """Operations of the whole run."""
        return sum(plan.flops for plan in self.stages)

    @property
    def fullest(self) -> StagePlan:
        """The stage that takes most memory."""
        return max(self.stages, key=lambda plan: plan.memory.device)


def make_plan(config: Config, *, world: int, vocab_size: int, kind: str = "cpu") -> Plan:
    """Count what a config takes on `world` ranks whose devices are of a kind, cpu or gpu."""
    with torch.device("meta"):
        model = LanguageModel(config.model, vocab_size=vocab_size)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    stages = []
    for stage in build_stages(config.curriculum, config.optimizer, config.objective):
        factors = batch_factors(
            seq_len=stage.seq_len,
            global_batch=stage.global_batch,
            world=world,
            device_tokens=config.engine.device_tokens,
        )
        causal = config.objective.kind == "causal"
        share = 1.0 if causal else stage.mask_rate
        flops = training_flops(
            config.model,
            vocab_size,
            [stage.seq_len] * stage.global_batch,
            round(share * stage.step_tokens),
            causal=causal,
        )
        activations = _activations(
            config, vocab_size, factors.micro_batch, stage.seq_len, share, kind
        )
        state = state_memory(
            num_parameters,
            config.engine,
            world,
            accumulation=factors.accumulation,
            activations=activations,
        )
        memory = replace(
            state.times(ALLOCATOR[kind]),
            activations=round(activations * ALLOCATOR[kind]),
            runtime=runtime_bytes(config.engine, kind),
        )
        sent = communication_bytes(
            num_parameters,
            config.engine,
            world=world,
            accumulation=factors.accumulation,
            size=BYTES[config.engine.precision],
        )
        stages.append(StagePlan(stage, factors, flops * stage.num_steps, memory, sent))
    return Plan(
        world=world,
        num_parameters=num_parameters,
        vocab_size=vocab_size,
        checkpoint_bytes=12 * num_parameters,
        stages=tuple(stages),
    )


def _activations(
    config: Config, vocab_size: int, rows: int, seq_len: int, share: float, kind: str
) -> int:
    # what does not shape them is left out, so that the search below finds them in the cache
    precision = config.engine.precision
    engine = EngineConfig(
        # they are counted as a CPU makes them, where bf16 has a form of attention of its own
        precision="fp16" if kind == "gpu" and precision == "bf16" else precision,
        activation_checkpointing=config.engine.activation_checkpointing,
        logits_mib=config.engine.logits_mib,
    )
    causal = config.objective.kind == "causal"
    model = config.model.model_dump_json()
    return _count_activations(
        model, engine.model_dump_json(), vocab_size, rows, seq_len, share, causal
    )


@cache
def _count_activations(
    model: str, engine: str, vocab_size: int, rows: int, seq_len: int, share: float, causal: bool
) -> int:
    settings = EngineConfig.model_validate_json(engine)
    return activation_bytes(
        ModelConfig.model_validate_json(model),
        settings,
        vocab_size,
        [seq_len] * rows,
        max(1, round(share * rows * seq_len)),
        causal=causal,
        max_targets=max(1, settings.logits_mib * 2**20 // (4 * vocab_size)),
    )


def smallest_change(
    config: Config, *, world: int, vocab_size: int, kind: str, capacity: float
) -> tuple[str, Plan] | None:
    """Return the change that makes a plan fit `capacity` bytes a rank at the least cost of speed.

    One key of the engine first, then two, then all that save memory; then more ranks. None where
    nothing does.
    """

    def plan_with(changes: Mapping[str, object], ranks: int) -> Plan | None:
        engine = config.engine.model_copy(update=dict(changes))
        if list(engine.problems()):
            return None
        changed = config.model_copy(update={"engine": engine})
        plan = make_plan(changed, world=ranks, vocab_size=vocab_size, kind=kind)
        return plan if plan.fullest.memory.device <= USABLE * capacity else None

    options = list(_changes(config, world))
    least = dict(options)  # of each key the last, which saves most
    if plan_with(least, world) is not None:
        for chosen in (*((one,) for one in options), *combinations(options, 2), least.items()):
            changes = dict(chosen)
            if len(changes) == len(chosen) and (plan := plan_with(changes, world)) is not None:
                return _words(changes), plan
    least |= {"zero_stage": 3}
    for factor in (2**n for n in range(1, 11)):
        ranks = world * factor
        if all(stage.global_batch % ranks == 0 for stage in config.curriculum.stages):
            if (plan := plan_with(least, ranks)) is not None:
                return f"{ranks} ranks with {_words(least)}", plan
    return None


def _words(changes: Mapping[str, object]) -> str:
    return " ".join(f"engine.{key}={_yaml(value)}" for key, value in changes.items())


def _changes(config: Config, world: int) -> Iterator[tuple[str, object]]:
    """Yield keys of `engine` with values that save memory, the cheapest first."""
    engine = config.engine
    for stage in (1, 2):
        if world > 1 and engine.zero_stage < stage:
            yield "zero_stage", stage
    tokens = engine.device_tokens // 2
    while tokens >= _longest(config):
        yield "device_tokens", tokens
        tokens //= 2
    if not engine.activation_checkpointing:
        yield "activation_checkpointing", True
    if world > 1 and engine.zero_stage < 3:
        yield "zero_stage", 3
    if engine.offload == "none" and (world > 1 or engine.zero_stage > 0):
        yield "offload", "optimizer"


def _longest(config: Config) -> int:
    lengths = [stage.seq_len for stage in config.curriculum.stages]
    return max([*lengths, config.evaluation.seq_len or 0])


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
