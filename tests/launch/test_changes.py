"""Another start of a run with another config: what is taken, what is refused, what is told."""

import pytest

from configs.loader import load
from launch.run_folder import changes, data_problems, folder_of, folder_problems, open_folder
from trainer.checkpoint import MANIFEST

FACTS = {"tokenizer": "t", "data": {"train": "a", "eval": None}}


@pytest.fixture
def begun(tiny_config):
    """A run of stages that end at 5, 9 and 12, whose last checkpoint is of step 7."""
    config = load(tiny_config)
    open_folder(config, FACTS)
    checkpoint = folder_of(config) / "checkpoints" / "step-00000007"
    checkpoint.mkdir(parents=True)
    (checkpoint / MANIFEST).write_text("{}")
    return lambda *overrides: load(tiny_config, list(overrides))


TAKEN = (
    "data.workers=4",
    "engine.device_tokens=64",
    "engine.zero_stage=3",
    "engine.precision=bf16",
    "tracking.every_steps=7",
    "curriculum.stages.1.steps=3",
    "curriculum.stages.2.steps=30",
    "evaluation.every_steps=2",
)
REFUSED = (
    "model.num_layers=3",
    "data.lanes=16",
    "tokenizer.model=other",
    "run.seed=2",
    "optimizer.lr=1e-2",
    "curriculum.stages.0.steps=6",
    "curriculum.stages.1.steps=1",
    "curriculum.stages.2.seq_len=32",
)


@pytest.mark.parametrize("override", TAKEN)
def test_what_leaves_the_past_as_it_was_is_taken_and_told(begun, override):
    config = begun(override)
    assert list(folder_problems(config)) == []
    assert any(change.key == override.partition("=")[0] for change in changes(config, FACTS))


@pytest.mark.parametrize("override", REFUSED)
def test_what_shapes_the_curve_is_refused_unless_it_is_named(begun, override):
    key = override.partition("=")[0]
    (problem,) = folder_problems(begun(override))
    assert f"{key}: " in problem
    assert f"checkpoint.allow_changes=[{key}]" in problem
    for name in (key, key.partition(".")[0]):
        allowed = begun(override, f"checkpoint.allow_changes=[{name}]")
        assert list(folder_problems(allowed)) == []
    other = begun(override, "checkpoint.allow_changes=[schedule]")
    assert len(list(folder_problems(other))) == 1


def test_other_data_is_refused_wherever_it_lies_and_the_same_is_taken(begun):
    moved = begun("data.train=elsewhere")
    assert list(folder_problems(moved)) == []
    assert list(data_problems(moved, FACTS)) == []
    other = FACTS | {"data": {"train": "b", "eval": None}}
    (problem,) = data_problems(begun(), other)
    assert "checkpoint.allow_changes=[data]" in problem
    assert list(data_problems(begun("checkpoint.allow_changes=[data]"), other)) == []


def test_the_same_config_has_nothing_to_tell(begun):
    assert changes(begun(), FACTS) == []
