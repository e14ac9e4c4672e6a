"""The curriculum: a list of stages with their places in the run, and a pure look-up.

Lengths and batches may go up and down from stage to stage (the paper's six stages do, table 4).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.config import CurriculumConfig, ObjectiveConfig, OptimizerConfig


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage and where it lies in the run."""

    name: str
    seq_len: int
    global_batch: int
    first_step: int
    """Steps completed when the stage begins."""
    last_step: int
    """Steps completed when it ends."""
    lr: float
    mask_rate: float
    mixture: Mapping[str, float] | None = None
    """Weights of the sources by name; None keeps those of `data.train`."""

    @property
    def num_steps(self) -> int:
        """Steps of this stage."""
        return self.last_step - self.first_step

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.seq_len


@dataclass(frozen=True, slots=True)
class Factors:
    """How a global batch is cut: micro_batch x accumulation x world = global_batch rows."""

    micro_batch: int
    """Rows a forward pass of one rank."""
    accumulation: int
    """Forward and backward passes a step."""
    world: int


def build_stages(
    curriculum: CurriculumConfig, optimizer: OptimizerConfig, objective: ObjectiveConfig
) -> tuple[Stage, ...]:
    """Lay the configured stages one after another."""
    stages: list[Stage] = []
    step = 0
    for config in curriculum.stages:
        stages.append(
            Stage(
                name=config.name,
                seq_len=config.seq_len,
                global_batch=config.global_batch,
                first_step=step,
                last_step=step + config.steps,
                lr=optimizer.lr if config.lr is None else config.lr,
                mask_rate=objective.mask_rate if config.mask_rate is None else config.mask_rate,
                mixture=config.mixture,
            )
        )
        step += config.steps
    return tuple(stages)


def remaining(stages: Sequence[Stage], step: int) -> tuple[Stage, ...]:
    """Return the stages that are not finished after `step` steps; the first may have begun."""
    return tuple(stage for stage in stages if step < stage.last_step)


def batch_factors(*, seq_len: int, global_batch: int, world: int, device_tokens: int) -> Factors:
    """Cut a global batch into the largest micro-batches that a device's token budget allows.

    Raises:
        ValueError: If the rows don't divide over the ranks, or no row fits the budget.
    """
    if global_batch % world:
        raise ValueError(
            f"a global batch of {global_batch} rows does not divide over {world} ranks; "
            f"take a multiple of {world}"
        )
    if seq_len > device_tokens:
        raise ValueError(
            f"a row of {seq_len} tokens is over engine.device_tokens={device_tokens}; raise it"
        )
    rows = global_batch // world
    fitting = range(1, min(rows, device_tokens // seq_len) + 1)
    micro_batch = max(n for n in fitting if rows % n == 0)
    return Factors(micro_batch=micro_batch, accumulation=rows // micro_batch, world=world)
