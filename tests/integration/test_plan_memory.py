"""The plan's memory, measured on a rank; tests/benchmarks/plan_memory.py has all cases."""

import pytest

from configs.loader import load
from launch.plan import make_plan
from tests.integration.test_resume import run


def test_planned_memory_is_what_ranks_take(tiny_config):
    sizes = {"num_layers": 6, "hidden_size": 384, "num_heads": 6, "intermediate_size": 1536}
    words = [
        *(f"model.{key}={value}" for key, value in sizes.items()),
        *("engine.zero_stage=2", "engine.device_tokens=1024", "checkpoint.every_steps=0"),
        "curriculum.stages=[{name: a, seq_len: 64, global_batch: 16, steps: 2}]",
    ]
    records = run(tiny_config, "measured", 1, *words)
    (row,) = make_plan(load(tiny_config, words), world=1, vocab_size=261).stages
    state_gib = (row.memory.device - row.memory.runtime) / 2**30
    assert state_gib > 0.3  # enough to be seen beside the runtime's 0.6
    assert row.memory.device / 2**30 == pytest.approx(records[2]["memory/peak_gib"], rel=0.1)
