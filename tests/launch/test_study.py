"""Numbers of a study against hand-made curves."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.study import Sample, load_run, load_study, measure_speed, steps_to_reach
from tests.launch.fake_runs import curve, run_config, write_run, write_study

TWO_STAGES = (("a", 128, 4, 20), ("b", 64, 8, 20))


def records(losses: dict[int, float | None], *, seq_len: int = 128) -> list[dict[str, Any]]:
    """One record a step with this held-out loss; stage b from step 21 on."""
    return [
        {
            "time": 1e9 + step,
            "elapsed_s": 2.0 * step,
            "step": step,
            "tokens": 512 * step,
            "stage": "a" if step <= 20 else "b",
            "seq_len": 128 if step <= 20 else 64,
            "global_batch": 4 if step <= 20 else 8,
            "train/loss": 5.0,
            "eval/loss": loss,
            "eval/accuracy": 0.5,
            "eval/seq_len": seq_len,
        }
        for step, loss in losses.items()
    ]


def write(tmp_path: Path, name: str, losses: dict[int, float | None], seq_len: int = 128) -> Path:
    config = run_config(name, stages=TWO_STAGES)
    return write_run(tmp_path / name, records(losses, seq_len=seq_len), config)


def test_last_object_of_a_step_wins_and_torn_lines_are_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path, "run", {10: 5.0, 20: 4.0, 30: 3.0})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "eval/lo\n[]\n')
        file.write(json.dumps(records({20: 4.5})[0]) + "\n")
        file.write('{"step": 50')
    run = load_run(folder)
    assert run["step"].tolist() == [10, 20, 30]
    assert run["eval/loss"].tolist() == [5.0, 4.5, 3.0]
    assert run.stage_names == ("a", "a", "b")
    assert np.isnan(run["never/logged"]).all()
    assert run.finished


def test_null_is_no_evaluation(tmp_path: Path) -> None:
    run = load_run(write(tmp_path, "run", {10: 5.0, 20: None, 30: 3.0}))
    assert run.evaluated.tolist() == [0, 2]
    assert run.last_evaluation("a") == 0
    assert run.last_evaluation("c") is None


def test_steps_to_reach_is_the_first_evaluated_step_at_or_below(tmp_path: Path) -> None:
    baseline = load_run(write(tmp_path, "learned", {10: 6.0, 20: 5.0, 30: 4.5, 40: 4.0}))
    treatment = load_run(write(tmp_path, "rope", {10: 5.0, 20: 4.001, 30: 4.0, 40: 3.0}))
    reach = steps_to_reach(treatment, baseline)
    assert reach is not None
    assert (reach.step, reach.of_steps, reach.share) == (30, 40, 0.75)
    assert (reach.tokens, reach.seconds, reach.time_share) == (512 * 30, 60, 0.75)
    assert steps_to_reach(baseline, treatment) is None


def test_evaluations_at_another_length_do_not_count(tmp_path: Path) -> None:
    baseline = load_run(write(tmp_path, "learned", {40: 4.0}))
    longer = load_run(write(tmp_path, "rope", {10: 3.0}, seq_len=256))
    assert steps_to_reach(longer, baseline) is None
    unevaluated = load_run(write(tmp_path, "none", {10: None}))
    assert steps_to_reach(baseline, unevaluated) is None


def test_table_has_the_last_evaluation_of_each_stage(tmp_path: Path) -> None:
    write(tmp_path, "rope", {10: 5.0, 20: 4.0, 30: 3.0, 40: 2.0})
    write(tmp_path, "learned", {10: 6.0, 20: 5.5})
    study = load_study([tmp_path / "rope", tmp_path / "learned"])
    a, b = study.table
    assert (a.stage.name, a.stage.seq_len, a.stage.global_batch, a.stage.steps) == ("a", 128, 4, 20)
    assert [sample and sample.mean for sample in a.loss.values()] == [4.0, 5.5]
    assert a.difference is not None
    assert a.difference.mean == -1.5
    assert b.loss["learned"] is None
    assert b.difference is None


def test_seeds_are_compared_in_pairs(tmp_path: Path) -> None:
    study = load_study([write_study(tmp_path / "s", {"rope": 2.0, "learned": 1.0}, (1, 2, 3))])
    assert (study.treatment, study.baseline, study.seeds) == ("rope", "learned", [1, 2, 3])
    row = study.table[0]
    rope, difference = row.loss["rope"], row.difference
    assert rope is not None
    assert difference is not None
    assert rope.n == difference.n == 3
    # the same noise stands in both arms of a seed, so pairs differ far less than seeds do
    assert difference.std < rope.std / 10
    assert len(study.reached) == 3


def test_sample() -> None:
    assert Sample.of([math.nan]) is None
    one = Sample.of([2.0, math.nan])
    assert one is not None
    assert (one.n, one.mean) == (1, 2.0)
    assert math.isnan(one.std)
    assert Sample.of([1.0, 3.0]) == Sample(2, 2.0, math.sqrt(2))


def test_speed_leaves_out_warm_up_and_shares_the_wait(tmp_path: Path) -> None:
    steps = [
        {
            "step": 5 * n, "elapsed_s": n, "stage": "a", "seq_len": 100, "global_batch": 2,
            "perf/tokens_per_s": 10.0 if n == 1 else 1000.0,
            "perf/data_wait_s": 0.25,
            "memory/peak_gib": float(n),
        }
        for n in (1, 2)
    ]  # fmt: skip
    speed = measure_speed([load_run(write_run(tmp_path / "run", steps))])
    assert speed.tokens_per_s is not None
    assert speed.tokens_per_s.mean == 1000
    assert speed.data_wait is not None
    assert speed.data_wait.mean == 0.25  # five steps of 200 tokens take 1 s
    assert speed.peak_gib is not None
    assert speed.peak_gib.mean == 2
    assert speed.mfu is None


def test_notes_name_what_is_unfair(tmp_path: Path) -> None:
    write(tmp_path, "rope", {40: 4.0})
    write_run(tmp_path / "part", records({10: None}), run_config("part"), finished=False)
    (tmp_path / "part" / "versions.json").write_text('{"data": "other"}')
    notes = load_study([tmp_path / "rope", tmp_path / "part"]).notes
    assert notes[0] == "part is not finished: its last step is 10 of 700."
    assert len(notes) == 4
    fair = load_study([write_study(tmp_path / "s", {"rope": 2.0, "learned": 1.0})])
    assert fair.notes == []


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("metrics.jsonl", None, "has not logged a step"),
        ("metrics.jsonl", "{", "no logged step"),
        ("metrics.jsonl", "\x00\ufffd\n", "no logged step"),
        ("config.yaml", None, "is this a run's folder"),
        ("config.yaml", "a: [", "cannot be read"),
        ("config.yaml", "a: b", "no curriculum.stages"),
        ("config.yaml", "- a", "not a mapping"),
        ("config.yaml", "curriculum: {stages: [{name: a}]}", "no curriculum.stages"),
        ("versions.json", "{", "cannot be read"),
    ],
)
def test_broken_run_is_one_line(tmp_path: Path, file: str, content: str | None, words: str) -> None:
    folder = write_run(tmp_path / "run", curve()[:5])
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(ValueError, match=words) as error:
        load_study([folder])
    assert str(folder / file) in str(error.value)
    assert "\n" not in str(error.value)


def test_broken_study_is_one_line(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", {"rope": 2.0, "learned": 1.0})
    for plan, words in (
        ('{"arms": ["rope"]}', "not a study"),
        ('{"arms": ["rope"], "seeds": [1], "runs": {"rope": []}}', "has no runs"),
        ('{"arms": ["rope"], "seeds": [1], "runs": {"rope": ["gone"]}}', "gone"),
    ):
        (folder / "study.json").write_text(plan)
        with pytest.raises(ValueError, match=words):
            load_study([folder])
    with pytest.raises(ValueError, match="different names"):
        load_study([folder / "rope", folder / "rope"])
