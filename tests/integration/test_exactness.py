"""Exact numbers under any split: ZeRO stage x accumulation x world, against a plain torch loop.

Rows have very unequal numbers of targets, one rank has none at all in one step, and gradients are
clipped, so that a mean of means, a lost factor or a local norm shows.
"""

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import ModelConfig
from model.heads import LanguageModel
from model.initialize import initialize
from tests.ranks import run_ranks
from trainer.config import EngineConfig, OptimizerConfig
from trainer.engine import MOMENTS, Engine, init_distributed, parameter_groups

STEPS, ROWS, LENGTH, VOCABULARY = 8, 8, 16, 51
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_heads=2,
    intermediate_size=64,
    max_positions=LENGTH,
    dropout=0.0,
)
OPTIMIZER = OptimizerConfig(lr=1e-2, clip_norm=0.5)
GRID = [(stage, accumulation) for stage in (0, 1, 2, 3) for accumulation in (1, 2, 4)]
Curve = list[tuple[float, float]]
State = dict[str, dict[str, Tensor]]


def make_batch(step: int) -> tuple[Tensor, list[int], Tensor]:
    """Return ids [8, 16], the number of targets of each row, and the targets [8, 16]."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    counts = torch.randint(0, 9, (ROWS,), generator=generator)
    if step == 3:
        counts[0::2] = 0  # the first of two ranks has no target
    return ids, counts.tolist(), torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)


def inputs(batch: tuple[Tensor, list[int], Tensor], rows: list[int]) -> tuple:
    ids, counts, targets = batch
    index = [n * LENGTH + k for n, row in enumerate(rows) for k in range(counts[row])]
    positions = torch.arange(LENGTH).repeat(len(rows))
    asked = torch.cat([targets[row, : counts[row]] for row in rows])
    lengths = (LENGTH,) * len(rows)
    return (ids[rows].flatten(), positions, lengths, torch.tensor(index, dtype=torch.long)), asked


def lr_of(step: int) -> float:
    return OPTIMIZER.lr * (step + 1) / STEPS


def build_model(weights: State | None = None, **forms: Any) -> LanguageModel:
    model = LanguageModel(MODEL, vocab_size=VOCABULARY, **forms)
    initialize(model, 1)
    if weights:
        model.load_state_dict({name: kinds["value"] for name, kinds in weights.items()})
    return model


def plain_torch(steps: int = STEPS) -> tuple[Curve, LanguageModel, torch.optim.AdamW]:
    """Train by a plain loop on whole batches; return (loss, gradient norm) of each step."""
    model = build_model()
    groups = parameter_groups(model, OPTIMIZER.weight_decay)
    adamw = torch.optim.AdamW(groups, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    curve = []
    for step in range(steps):
        batch = make_batch(step)
        arguments, asked = inputs(batch, list(range(ROWS)))
        loss = torch.nn.functional.cross_entropy(model.logits(*arguments), asked)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = lr_of(step)
        adamw.step()
        adamw.zero_grad()
        curve.append((float(loss.detach()), float(norm)))
    return curve, model, adamw


def train(engine: Engine, accumulation: int, steps: range, naive: bool = False) -> Curve:
    """Train an engine; `naive` takes means of micro-batches, as a wrong loop would."""
    engine.set_accumulation(accumulation)
    rank, world = engine.world.rank, engine.world.size
    curve = []
    for step in steps:
        batch = make_batch(step)
        count = float(sum(batch[1]))
        mine = [row for row in range(ROWS) if row % world == rank]
        size, total = len(mine) // accumulation, 0.0
        for start in range(0, len(mine), size):
            arguments, asked = inputs(batch, mine[start : start + size])
            loss = engine.forward(*arguments, asked).total
            own = len(asked) * world * accumulation if naive else count
            engine.backward(loss, own)
            total += float(loss.detach())
        norm = engine.step(lr_of(step))
        summed = torch.tensor(total, dtype=torch.float64)
        torch.distributed.all_reduce(summed)
        curve.append((float(summed) / count, norm))
    return curve


def build_engine(
    stage: int,
    precision: str = "fp32",
    weights: State | None = None,
    *,
    offload: str = "none",
    **forms: Any,
) -> Engine:
    from trainer.distributed import world_from_environment

    return Engine(
        build_model(weights, **forms),
        engine=EngineConfig(zero_stage=stage, precision=precision, offload=offload),
        optimizer=OPTIMIZER,
        world=world_from_environment(),
        max_accumulation=4,
    )


def start() -> None:
    from trainer.distributed import world_from_environment

    torch.set_num_threads(1)
    init_distributed(world_from_environment(), timeout_s=60)


def run_grid() -> dict:
    start()
    curves = {
        (stage, accumulation): train(build_engine(stage), accumulation, range(STEPS))
        for stage, accumulation in GRID
    }
    for stage in (0, 1, 2, 3):  # as stages of a curriculum do: 3 steps, then 5 of another
        engine = build_engine(stage)
        curve = train(engine, 1, range(3)) + train(engine, 4, range(3, 5))
        curves[f"{stage} with growing", 4] = curve + train(engine, 2, range(5, STEPS))
    for stage in (1, 2, 3):
        engine = build_engine(stage, offload="optimizer")
        curves[f"{stage} with offload", 2] = train(engine, 2, range(STEPS))
    for stage in (0, 2, 3):
        engine = build_engine(stage, checkpoint_layers=True, max_targets=3)
        curves[f"{stage} with checkpointing and logits in parts", 2] = train(
            engine, 2, range(STEPS)
        )
    several = torch.distributed.get_world_size() > 1
    for stage in (0, 1, 2, 3) if several and shutil.which("g++") else ():
        engine = build_engine(stage, compile_layers=True, checkpoint_layers=stage > 1)
        curves[f"{stage} compiled", 2] = train(engine, 2, range(STEPS))
    curves["naive"] = train(build_engine(2), 2, range(STEPS), naive=True)
    return curves


@pytest.mark.parametrize("world", [1, 2])
def test_every_split_gives_the_curve_of_a_plain_loop(world, record_property):
    expected, _, _ = plain_torch()
    results = run_ranks(world, run_grid)
    naive = results[0].pop("naive")
    largest = 0.0
    for (stage, accumulation), curve in results[0].items():
        for step, (got, want) in enumerate(zip(curve, expected, strict=True)):
            difference = max(abs(got[0] - want[0]), abs(got[1] - want[1]))
            largest = max(largest, difference)
            assert difference < 1e-5, (
                f"ZeRO-{stage}, accumulation {accumulation}, world {world}, step {step}: "
                f"{got} and not {want}"
            )
    record_property("largest difference", largest)
    assert max(abs(a[0] - b[0]) for a, b in zip(naive, expected, strict=True)) > 1e-3
    assert all(rank_curves[key] == results[0][key] for rank_curves in results for key in results[0])


FORMS = [(stage, "fp32") for stage in (0, 1, 2, 3)] + [(stage, "bf16") for stage in (0, 1, 2, 3)]


def save_after(steps: int, stage: int) -> tuple[State, int, Curve]:
    start()
    engine = build_engine(stage)
    train(engine, 2, range(steps))
    state = {name: dict(tensors) for name, tensors in engine.gather_state()}
    return state, engine.optimizer_steps, train(engine, 2, range(steps, STEPS))


def go_on_in_every_form(state: State, optimizer_steps: int, first: int) -> dict:
    start()
    found = {}
    for stage, precision in FORMS:
        engine = build_engine(stage, precision, state)
        engine.restore_state(state, optimizer_steps)
        kept = {name: dict(tensors) for name, tensors in engine.gather_state()}
        same = all(
            torch.equal(kept[name][kind], state[name][kind])
            for name in state
            for kind in ("value", *MOMENTS)
        )
        curve = train(engine, 2, range(first, STEPS))
        found[stage, precision] = same, engine.optimizer_steps, curve
    engine = build_engine(2, "fp32", state)  # what a resume that forgets Adam's state gives
    found["forgetful"] = train(engine, 2, range(first, STEPS))
    return found


@pytest.mark.parametrize(("saved_world", "world"), [(2, 1), (1, 2)])
def test_state_goes_on_in_any_world_stage_and_precision(saved_world, world):
    saved = run_ranks(saved_world, save_after, 4, 2)
    state, optimizer_steps, expected = saved[0]
    assert optimizer_steps == 4
    results = run_ranks(world, go_on_in_every_form, state, optimizer_steps, 4)
    forgetful = results[0].pop("forgetful")
    for (stage, precision), (same, steps, curve) in results[0].items():
        assert same, f"ZeRO-{stage} {precision} does not hold what was put into it"
        assert steps == STEPS
        tolerance = 1e-5 if precision == "fp32" else 2e-2
        for got, want in zip(curve, expected, strict=True):
            assert abs(got[0] - want[0]) < tolerance, f"ZeRO-{stage} {precision}"
    assert max(abs(a[0] - b[0]) for a, b in zip(forgetful, expected, strict=True)) > 1e-3


def test_saved_state_is_that_of_a_plain_loop():
    state, _, _ = run_ranks(2, save_after, 4, 3)[0]
    _, model, adamw = plain_torch(4)
    for name, parameter in model.named_parameters():
        assert torch.allclose(state[name]["value"], parameter.detach(), atol=1e-6)
        for moment in MOMENTS:
            assert torch.allclose(state[name][moment], adamw.state[parameter][moment], atol=1e-6)
    assert sum("words" in name for name in state) == 1  # the tied weight stands there once
