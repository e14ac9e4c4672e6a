"""Cut at its hardest places and put together again: a run on the same world is equal bit for bit.

Each lane holds documents that fill its rows exactly, so an epoch ends with a step, where a cursor
could be off by one document, shard or epoch. Pieces share their processes but nothing of training:
each builds its engine, loader and state anew from the checkpoint.
"""

import json
from pathlib import Path

import pytest
import yaml

from configs.loader import load
from data_pipeline.config import TokenizerConfig
from data_pipeline.corpus import Document
from data_pipeline.shards import write_shards
from data_pipeline.tokenizers import load_tokenizer
from tests.conftest import TINY
from tests.integration.processes import read_records
from tests.ranks import run_ranks

LANES = 8
STOPS = (2, 3, 5, 6, 9, 10, 11)
"""Thrice inside epoch 0, at its end, at the end of stage 1 in the midst of epoch 1, in stage 2 at
the end of epoch 1 and inside epoch 2."""
STEPS = 16


pytestmark = pytest.mark.xdist_group("exact")  # its runs are trained once


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exact")
    documents = [
        Document(str(number), (f"{number} the people of war and peace " * 4)[:94])
        for number in range(2 * LANES)  # with [CLS] and [SEP] 192 tokens a lane: its epoch
    ]
    tokenizer = load_tokenizer(TokenizerConfig(kind="bytes"))
    write_shards(
        documents, tokenizer, folder / "train", seed=1, min_shards=LANES, shard_mib=64, workers=1
    )
    stages = [
        {"name": "a", "seq_len": 32, "global_batch": 8, "steps": 9},
        {"name": "b", "seq_len": 48, "global_batch": 16, "steps": STEPS - 9},
    ]
    data = TINY | {
        "run": {**TINY["run"], "dir": str(folder / "runs")},
        "data": {"train": str(folder / "train"), "lanes": LANES, "workers": 2},
        "model": {**TINY["model"], "dropout": 0.1},
        "curriculum": {"stages": stages},
        "engine": {"device_tokens": 128, "zero_stage": 1},  # accumulation 1, then 4
        "checkpoint": {"every_steps": 0, "keep": 99},
    }
    file = folder / "exact.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


RUNS = {
    "whole": ((), None),
    "pieces": (STOPS, None),
    "without-a-cursor": ((12,), "data/hash"),
    "without-its-dropout": ((12,), "train/loss"),
}
"""Where each run is stopped, and what differs where a control forgets something at the last."""


def train_all(config: Path) -> None:
    """Be a rank of all runs, one after another."""
    from trainer.distributed import world_from_environment
    from trainer.engine import init_distributed

    world = world_from_environment()
    init_distributed(world, timeout_s=240)
    for name, (stops, _) in RUNS.items():
        for stop_after in (*stops, None):
            train_until(config, name, stop_after, world)


def train_until(config: Path, name: str, stop_after: int | None, world) -> None:
    """Start or go on, and be asked to stop in a step (None: never)."""
    from launch.assembly import build_trainer
    from launch.preflight import prepare
    from launch.recording import recording
    from launch.run_folder import STOP, folder_of
    from trainer.distributed import barrier
    from trainer.preemption import Preempted, StopRequest

    prepared = prepare(load(config, [f"run.name={name}", "launch.num_processes=2"]), world.size)
    barrier()  # before one of us holds the folder's lock
    stop = StopRequest(folder_of(prepared.config) / STOP)
    try:
        with recording(prepared, world, None) as metrics:
            trainer = build_trainer(prepared, world, stop, metrics, None)
            if stop_after is None and name == "without-a-cursor":
                trainer.state.cursors.pop(min(trainer.state.cursors))
            if stop_after is None and name == "without-its-dropout":
                trainer.seed_dropout = lambda number: None
            train_step = trainer.train_step

            def step_then_ask(*arguments):
                if trainer.state.step + 1 == stop_after and world.rank == 1:
                    stop._file.touch()
                return train_step(*arguments)

            trainer.train_step = step_then_ask
            trainer.fit()
        assert stop_after is None
    except Preempted:
        assert trainer.state.step == stop_after
    barrier()  # until the first of us has let the folder's lock go


@pytest.fixture(scope="module")
def records(config) -> dict[str, list[dict]]:
    run_ranks(2, train_all, config, timeout_s=600)
    folder = Path(load(config).run.dir)
    return {name: read_records(folder / name) for name in RUNS}


EQUAL = ("data/hash", "train/loss", "train/accuracy", "grad_norm", "lr", "tokens")


def differing_steps(got: list[dict], want: list[dict]) -> dict[int, list[str]]:
    assert [record["step"] for record in got] == list(range(1, STEPS + 1))
    pairs = zip(got, want, strict=True)
    differ = {g["step"]: [key for key in EQUAL if g[key] != w[key]] for g, w in pairs}
    return {step: keys for step, keys in differ.items() if keys}


def test_pieces_are_equal_to_the_whole_bit_for_bit(config, records):
    whole = records["whole"]
    assert len({record["data/hash"] for record in whole}) == STEPS  # epochs differ, too
    assert differing_steps(records["pieces"], whole) == {}
    places = {step: cursors_at(config, step) for step in STOPS}
    assert places[6] == {(1, 0, 0, 0)}
    assert places[10] == {(2, 0, 0, 0)}
    assert places[11] == {(2, 0, 1, 0)}


def cursors_at(config: Path, step: int) -> set[tuple[int, ...]]:
    checkpoint = Path(load(config).run.dir) / f"pieces/checkpoints/step-{step:08d}"
    state = json.loads((checkpoint / "state.json").read_text())
    return {tuple(cursor) for cursor in state["cursors"].values()}


@pytest.mark.parametrize("name", ["without-a-cursor", "without-its-dropout"])
def test_a_resume_that_forgets_something_is_noticed(records, name):
    differ = differing_steps(records[name], records["whole"])
    assert min(differ) == 13
    assert RUNS[name][1] in differ[13]
