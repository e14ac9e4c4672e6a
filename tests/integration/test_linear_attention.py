"""Linear attention under the engine: ZeRO, worlds, and random features after a resume."""

import pytest

from tests.integration.test_resume import TOTAL_STEPS, assert_same_curve, run

PERFORMER = (
    "objective.kind=causal",
    "model.attention=linear",
    "model.features=favor",
    "model.num_features=24",
    "model.redraw_steps=4",  # draws change at steps 4, 8 and 12
)


def test_a_performer_in_pieces_has_the_curve_of_one_in_one_go(tiny_config):
    whole = run(tiny_config, "whole", 1, *PERFORMER)
    assert sorted(whole) == list(range(1, TOTAL_STEPS + 1))
    assert whole[TOTAL_STEPS]["train/loss"] < whole[1]["train/loss"] - 0.1
    run(tiny_config, "in-pieces", 2, *PERFORMER, "engine.zero_stage=3", stop_after=6)
    checkpointing = ("engine.zero_stage=1", "engine.activation_checkpointing=true")
    got = run(tiny_config, "in-pieces", 1, *PERFORMER, *checkpointing)
    assert_same_curve(got, whole)

    never = run(tiny_config, "never", 1, *PERFORMER, "model.redraw_steps=0")
    for step in range(1, 4):
        assert never[step]["train/loss"] == whole[step]["train/loss"]
    with pytest.raises(AssertionError):  # other features are another curve, from step 4 on
        assert_same_curve(never, whole)
