"""A loss or gradient that is no number, on one rank of two: skipped by all, in every form."""

import math

import torch

from tests.integration.test_exactness import ROWS, build_engine, inputs, lr_of, make_batch, start
from tests.ranks import run_ranks

FORMS = [(stage, precision) for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")]


def step(engine, number: int, harm: str = "") -> float:
    """Make a step of two micro-batches; rank 1 suffers the harm in its second one."""
    world, batch = engine.world, make_batch(number)
    mine = [row for row in range(ROWS) if row % world.size == world.rank]
    total = 0.0
    for part in (mine[:2], mine[2:]):
        arguments, asked = inputs(batch, part)
        loss = engine.forward(*arguments, asked).total
        if harm and part is not mine[:2] and world.rank == 1:
            if harm == "nan in the gradient":
                loss.register_hook(lambda gradient: gradient * math.nan)
            else:
                loss = loss * (math.inf if harm == "infinite loss" else math.nan)
        engine.backward(loss, float(sum(batch[1])))
        total += float(loss.detach())
    summed = torch.tensor(total, dtype=torch.float64)
    torch.distributed.all_reduce(summed)
    return engine.step(lr_of(number), skip=not math.isfinite(float(summed)))


def state_of(engine) -> dict:
    return {n: {k: t.clone() for k, t in tensors.items()} for n, tensors in engine.gather_state()}


def skip_in_every_form() -> dict:
    start()
    found = {}
    for form in FORMS:
        engine, plain = build_engine(*form), build_engine(*form)
        for each in (engine, plain):
            each.set_accumulation(2)
            step(each, 0)
        before, steps = state_of(engine), engine.optimizer_steps
        norms = [step(engine, n, harm) for n, harm in enumerate(HARMS, 1)]
        after = state_of(engine)
        found[form] = {
            "same": all(torch.equal(before[n][k], after[n][k]) for n in before for k in before[n]),
            "steps": engine.optimizer_steps - steps,
            "sound": [engine.is_sound(norm) for norm in norms],
            "next": step(engine, 5) == step(plain, 5),
            "end": all(
                torch.equal(a[k], b[k])
                for a, b in zip(state_of(engine).values(), state_of(plain).values(), strict=True)
                for k in a
            ),
        }
    return found


HARMS = ("nan loss", "infinite loss", "nan in the gradient")


def test_a_bad_step_changes_nothing_and_the_next_one_is_as_if_it_had_not_been():
    for rank in run_ranks(2, skip_in_every_form):
        for form, found in rank.items():
            assert found["same"], form
            assert found["steps"] == 0, form
            assert not any(found["sound"]), form
            assert found["next"], form
            assert found["end"], form
