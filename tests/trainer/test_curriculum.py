import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import CurriculumConfig, ObjectiveConfig, OptimizerConfig
from trainer.curriculum import batch_factors, build_stages, remaining

STAGES = [
    {"name": "a", "seq_len": 128, "global_batch": 8, "steps": 5},
    {"name": "b", "seq_len": 256, "global_batch": 4, "steps": 3, "lr": 2e-4, "mask_rate": 0.3},
    {"name": "c", "seq_len": 64, "global_batch": 16, "steps": 2},
]


@pytest.fixture
def stages():
    curriculum = CurriculumConfig.model_validate({"stages": STAGES})
    return build_stages(curriculum, OptimizerConfig(lr=1e-4), ObjectiveConfig(mask_rate=0.15))


def test_stages_lie_one_after_another(stages):
    assert [(s.first_step, s.last_step) for s in stages] == [(0, 5), (5, 8), (8, 10)]
    assert [s.lr for s in stages] == [1e-4, 2e-4, 1e-4]
    assert [s.mask_rate for s in stages] == [0.15, 0.3, 0.15]
    assert [s.step_tokens for s in stages] == [1024, 1024, 1024]


@pytest.mark.parametrize(
    ("step", "names"), [(0, "abc"), (4, "abc"), (5, "bc"), (7, "bc"), (8, "c"), (10, "")]
)
def test_remaining_begins_with_the_stage_of_the_next_step(stages, step, names):
    assert "".join(stage.name for stage in remaining(stages, step)) == names


@given(
    rows=st.integers(1, 64), world=st.integers(1, 8), seq_len=st.integers(1, 64), fit=st.integers(1)
)
def test_factors_multiply_to_the_batch_and_fit_the_device(rows, world, seq_len, fit):
    device_tokens = seq_len * (fit % 32 + 1)
    factors = batch_factors(
        seq_len=seq_len, global_batch=rows * world, world=world, device_tokens=device_tokens
    )
    assert factors.micro_batch * factors.accumulation * factors.world == rows * world
    assert factors.micro_batch * seq_len <= device_tokens
    larger = [n for n in range(factors.micro_batch + 1, rows + 1) if rows % n == 0]
    assert all(n * seq_len > device_tokens for n in larger)


def test_what_does_not_divide_is_refused_with_its_numbers():
    with pytest.raises(ValueError, match=r"10 rows does not divide over 4 ranks"):
        batch_factors(seq_len=8, global_batch=10, world=4, device_tokens=64)
    with pytest.raises(ValueError, match=r"128 tokens is over engine.device_tokens=64"):
        batch_factors(seq_len=128, global_batch=4, world=4, device_tokens=64)
