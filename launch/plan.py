"""`roformer plan`: what a config asks for, stage by stage, before anything is started.

Counted: batch factors, tokens, FLOPs (`model.flops`), parameters, bytes of the training state under
ZeRO, checkpoint size. Estimated: activations, and time at the stated share of this machine's
measured matmul rate.
"""

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from configs.loader import ConfigError
from configs.schema import Config
from data_pipeline.tokenizers import load_tokenizer
from launch.errors import EXIT_BAD_INPUT, EXIT_OK
from launch.preflight import local_processes, prepare
from model.config import ModelConfig
from model.flops import training_flops
from model.heads import LanguageModel
from trainer.config import EngineConfig
from trainer.curriculum import Factors, Stage, batch_factors, build_stages
from trainer.metrics import measure_matmul_peak

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
ASSUMED_MFU = 0.4


@dataclass(frozen=True)
class StagePlan:
    """What one stage takes."""

    stage: Stage
    factors: Factors
    flops: int
    """Operations of the whole stage, all ranks."""
    activation_bytes: int
    """Kept for the backward pass of a micro-batch, one rank (estimate)."""


@dataclass(frozen=True)
class Plan:
    """What a run takes."""

    world: int
    num_parameters: int
    vocab_size: int
    state_bytes: int
    """Weights, gradients, masters and moments of one rank."""
    checkpoint_bytes: int
    stages: tuple[StagePlan, ...]

    @property
    def flops(self) -> int:
        """Operations of the whole run."""
        return sum(plan.flops for plan in self.stages)


def make_plan(config: Config, *, world: int, vocab_size: int) -> Plan:
    """Count what a config takes on `world` ranks."""
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
        tokens = factors.micro_batch * stage.seq_len
        activations = activation_bytes(
            config.model, config.engine, vocab_size, tokens, share, causal=causal
        )
        stages.append(StagePlan(stage, factors, flops * stage.num_steps, activations))
    return Plan(
        world=world,
        num_parameters=num_parameters,
        vocab_size=vocab_size,
        state_bytes=state_bytes(num_parameters, config.engine, world),
        checkpoint_bytes=12 * num_parameters,
        stages=tuple(stages),
    )


def state_bytes(num_parameters: int, engine: EngineConfig, world: int) -> int:
    """Return the bytes of weights, gradients, fp32 masters and moments that one rank holds.

    ZeRO-1 parts masters and moments over the ranks, ZeRO-2 gradients as well, ZeRO-3 everything
    (Rajbhandari et al., arXiv 1910.02054, section 5). In fp32, ZeRO keeps a second, parted copy of
    the weights as masters.
    """
    low = BYTES[engine.precision]
    stage = engine.zero_stage
    has_masters = engine.precision != "fp32" or stage > 0
    weights = low / (world if stage == 3 else 1)
    gradients = low / (world if stage >= 2 else 1)
    optimizer = (8 + 4 * has_masters) / (world if stage >= 1 else 1)
    return round(num_parameters * (weights + gradients + optimizer))


def activation_bytes(
    model: ModelConfig,
    engine: EngineConfig,
    vocab_size: int,
    tokens: int,
    share: float,
    *,
    causal: bool = False,
) -> int:
    """Estimate the bytes kept for the backward pass of `tokens` tokens.

    Per layer and token: the inputs of four projections, q, k, v, two GELU tensors, two norms and
    the attention's output. Linear attention adds its features in fp32, about 4 times over, and 8
    times where it is causal. With activation checkpointing one tensor a layer, and one whole layer.
    The head adds fp32 logits, their softmax and their gradient at targets.
    """
    width, inner, size = model.hidden_size, model.intermediate_size, BYTES[engine.precision]
    layer = tokens * (12 * width + 2 * inner) * size
    if model.attention == "linear":
        per_head = 8 * model.query_size + 4 * model.head_size if causal else 4 * model.query_size
        layer += tokens * model.num_heads * per_head * 4
    kept = model.num_layers * layer
    if engine.activation_checkpointing:
        kept = model.num_layers * tokens * width * size + layer
    return round(kept + share * tokens * vocab_size * 12)


def print_plan(config: Config, console: Console) -> int:
    """Print the plan of a config on this machine, and what it still lacks; return the exit code."""
    world = local_processes(config)
    try:
        vocab_size = load_tokenizer(config.tokenizer).vocab_size
    except (ValueError, OSError):
        vocab_size = config.tokenizer.vocab_size or 8000  # what is wrong is told at the end
    plan = make_plan(config, world=world, vocab_size=vocab_size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if config.engine.precision == "fp32" else torch.bfloat16
    rate = measure_matmul_peak(device, dtype) * (world if device.type == "cuda" else 1)
    console.print(
        f"plan: {config.run.name}, {plan.num_parameters / 1e6:,.1f} M parameters "
        f"(vocabulary {vocab_size:,}), {world} rank{'s' * (world > 1)}, "
        f"ZeRO-{config.engine.zero_stage}, {config.engine.precision}"
    )
    console.print(_stage_table(plan, rate))
    console.print(
        f"a rank holds {_gib(plan.state_bytes)} of state and at most "
        f"{_gib(max(p.activation_bytes for p in plan.stages))} of activations (estimate); "
        f"a checkpoint takes {_gib(plan.checkpoint_bytes)}"
    )
    seconds = plan.flops / (rate * ASSUMED_MFU)
    console.print(
        f"{plan.flops:.3g} FLOPs in all: about {_time(seconds)} at {ASSUMED_MFU:.0%} of the "
        f"{rate / 1e9:,.0f} GFLOP/s that matmuls reach here now; evaluation and saving come on top"
    )
    try:
        prepare(config, world, new_run=False)
    except ConfigError as error:
        for problem in error.problems:
            console.print(f"not ready: {problem}", style="yellow")
        return EXIT_BAD_INPUT
    return EXIT_OK


def _stage_table(plan: Plan, rate: float) -> Table:
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
            _count(stage.num_steps * stage.step_tokens),
            f"{row.flops:.2g}",
            _time(row.flops / (rate * ASSUMED_MFU)),
        )
    return table


def _count(number: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"


def _time(seconds: float) -> str:
    for unit, size in (("years", 31557600), ("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
