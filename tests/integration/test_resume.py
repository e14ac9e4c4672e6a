"""One run, cut into pieces on other worlds: the same curve as in one go."""

import json
import math
import os
import signal
from pathlib import Path

import pytest
import yaml

from configs.loader import load
from tests.conftest import make_documents
from tests.data_pipeline.test_archive import make_tar
from tests.ranks import run_ranks

TOTAL_STEPS = 12  # of tests.conftest.TINY: stages end at 5, 9 and 12


def train_until(config: Path, overrides: list[str], stop_after: int, forget_cursors: bool) -> None:
    """Be a rank of a run that is asked to stop after a step (0: never)."""
    from launch.assembly import build_trainer
    from launch.preflight import prepare
    from launch.recording import recording
    from launch.run_folder import STOP, folder_of
    from trainer.distributed import world_from_environment
    from trainer.engine import init_distributed
    from trainer.preemption import Preempted, StopRequest

    world = world_from_environment()
    prepared = prepare(load(config, overrides), world.size)
    init_distributed(world, timeout_s=60)
    stop = StopRequest(folder_of(prepared.config) / STOP)
    stop.install()
    preempted = False
    try:
        with recording(prepared, world, None) as metrics:
            trainer = build_trainer(prepared, world, stop, metrics, None)
            if forget_cursors:
                trainer.state.cursors.clear()
            train_step = trainer.train_step

            def step_then_ask(*arguments):
                if world.rank == world.size - 1 and trainer.state.step == stop_after - 1:
                    os.kill(os.getpid(), signal.SIGTERM)  # one rank is told, and all must agree
                return train_step(*arguments)

            trainer.train_step = step_then_ask
            trainer.fit()
    except Preempted:
        preempted = True
    assert preempted == bool(stop_after)


def run(
    config: Path,
    name: str,
    world: int,
    *overrides: str,
    stop_after: int = 0,
    forget_cursors: bool = False,
) -> dict[int, dict]:
    """Run a piece of the run `name`; return its records so far by step."""
    settings = [f"run.name={name}", f"launch.num_processes={world}", *overrides]
    run_ranks(world, train_until, config, settings, stop_after, forget_cursors)
    folder = Path(load(config, settings).run.dir) / name
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record for record in records}


def assert_same_curve(got: dict[int, dict], want: dict[int, dict]) -> None:
    assert sorted(got) == sorted(want)
    for step, record in want.items():
        assert got[step]["data/hash"] == record["data/hash"], f"other data in step {step}"
        for key in ("train/loss", "grad_norm", "lr", "eval/loss", "eval/accuracy", "eval/targets"):
            if key in record:
                assert got[step][key] == pytest.approx(record[key], rel=1e-5, abs=1e-5), (step, key)


@pytest.fixture
def mixed_config(tiny_config, tmp_path) -> Path:
    """Return a config of two weighted sources, one of them tars of text, few and one damaged."""
    for shard in range(3):
        files = {
            f"{shard}{n}.txt": document.text.encode()
            for n, document in enumerate(make_documents(12, seed=shard))
        }
        content = make_tar(files)
        (tmp_path / f"s-{shard}.tar").write_bytes(content[:3000] if shard == 1 else content)
    (tmp_path / "one.tar").write_bytes(make_tar({"a.txt": b"the only document that is held out"}))
    settings = yaml.safe_load(tiny_config.read_text())
    settings["data"] |= {
        "train": [
            {"name": "tokens", "shards": settings["data"]["train"], "weight": 2},
            {"name": "texts", "shards": f"{tmp_path}/s-{{0..2}}.tar"},
        ],
        "eval": f"{tmp_path}/one.tar",
        "on_error": "skip_shard",
    }
    settings["curriculum"]["stages"][1]["mixture"] = {"texts": 1}
    path = tmp_path / "mixed.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_a_run_in_pieces_on_any_world_has_the_curve_of_one_in_one_go(mixed_config):
    """Weights change by stage, a shard is left out, one document is held out for four ranks."""
    whole = run(mixed_config, "whole", 1)
    assert whole[TOTAL_STEPS]["data/tokens/texts"] == pytest.approx(
        1280 / 3 + 1024 + 768 / 3, abs=100
    )
    assert whole[TOTAL_STEPS]["data/skipped_shards"] == 1
    assert sorted(whole) == list(range(1, TOTAL_STEPS + 1))
    assert len({record["data/hash"] for record in whole.values()}) == TOTAL_STEPS
    assert [step for step in whole if "eval/loss" in whole[step]] == [5, 9, 12]

    pieces = ("in-pieces", 2, "data.workers=2", "engine.zero_stage=3")
    first = run(mixed_config, *pieces, stop_after=3)
    assert sorted(first) == [1, 2, 3]
    run(
        mixed_config, "in-pieces", 1, "engine.zero_stage=0", "engine.device_tokens=64", stop_after=5
    )
    run(mixed_config, "in-pieces", 4, "data.workers=1", "engine.zero_stage=2", stop_after=8)
    got = run(mixed_config, "in-pieces", 2, "data.workers=1", "engine.zero_stage=1")
    assert_same_curve(got, whole)
    for key in ("data/tokens/tokens", "data/tokens/texts", "data/skipped"):
        assert got[TOTAL_STEPS][key] == whole[TOTAL_STEPS][key]


def test_a_resume_that_forgets_its_cursors_is_noticed(tiny_config):
    whole = run(tiny_config, "whole", 1)
    run(tiny_config, "forgetful", 1, stop_after=5)
    got = run(tiny_config, "forgetful", 1, forget_cursors=True)
    with pytest.raises(AssertionError, match="other data in step 6"):
        assert_same_curve(got, whole)


def test_learning_rate_by_tokens_of_padded_rows(tiny_config):
    by_tokens = ["schedule.unit=tokens", "schedule.kind=linear", "schedule.warmup=600"]
    records = run(tiny_config, "by-tokens", 1, *by_tokens, "data.packing=padded")
    assert records[TOTAL_STEPS]["train/loss"] < records[1]["train/loss"]
    total = records[TOTAL_STEPS]["tokens"]
    for record in records.values():
        t = record["tokens"]
        expected = 1e-3 * (t / 600 if t <= 600 else (total - t) / (total - 600))
        assert record["lr"] == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_other_choices_train(tiny_config):
    choices = [
        *("objective.kind=causal", "model.positions=sinusoidal", "engine.precision=bf16"),
        *(
            "engine.zero_stage=3",
            "engine.offload=optimizer",
            "engine.activation_checkpointing=true",
        ),
        *(
            "optimizer.lr=1e-2",
            "model.dropout=0.1",
            "engine.deepspeed.zero_optimization.reduce_bucket_size=10000",
        ),
    ]
    records = run(tiny_config, "choices", 2, *choices)
    losses = [record["train/loss"] for record in records.values()]
    assert losses[0] == pytest.approx(math.log(261), abs=0.1)  # bytes and five special ids
    assert losses[-1] < losses[0] - 0.5
    assert records[1]["train/targets"] > 0.7 * 8 * 32  # all but each piece's last
