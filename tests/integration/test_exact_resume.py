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
from tests.ranks import run_ranks

LANES = 8
STOPS = (2, 3, 5, 6, 9, 10, 11)
"""Thrice inside epoch 0, at its end, at the end of stage 1 in the midst of epoch 1, in stage 2 at
the end of epoch 1 and inside epoch 2."""
STEPS = 16


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


def train_in_pieces(config: Path, name: str, stops: tuple[int, ...], forget: str) -> None:
    """Be a rank that is stopped after each of `stops`, and goes on each time."""
    from launch.preflight import prepare
    from launch.run_folder import STOP, folder_of
    from launch.train import build_trainer, recording
    from trainer.distributed import world_from_environment
    from trainer.engine import init_distributed
    from trainer.preemption import Preempted, StopRequest

    world = world_from_environment()
    settings = [f"run.name={name}", f"launch.num_processes={world.size}"]
    prepared = prepare(load(config, settings), world.size)
    init_distributed(world, timeout_s=60)
    for stop_after in (*stops, None):
        stop = StopRequest(folder_of(prepared.config) / STOP)
        try:
            with recording(prepared, world, None) as metrics:
                trainer = build_trainer(prepared, world, stop, metrics, None)
                if stop_after is None and forget == "a cursor":
                    trainer.state.cursors.pop(min(trainer.state.cursors))
                if stop_after is None and forget == "dropout's generator":
                    trainer.seed_dropout = lambda number: None
                train_step = trainer.train_step

                def step_then_ask(*arguments, trainer=trainer, train_step=train_step, stop=stop):
                    if trainer.state.step + 1 == stop_after and world.rank == 1:  # noqa: B023
                        stop._file.touch()
                    return train_step(*arguments)

                trainer.train_step = step_then_ask
                trainer.fit()
            assert stop_after is None
        except Preempted:
            assert trainer.state.step == stop_after


def train(config: Path, name: str, stops: tuple[int, ...] = (), forget: str = "") -> list[dict]:
    run_ranks(2, train_in_pieces, config, name, stops, forget)
    folder = Path(load(config).run.dir) / name
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


EQUAL = ("data/hash", "train/loss", "train/accuracy", "grad_norm", "lr", "tokens")


def differing_steps(got: list[dict], want: list[dict]) -> dict[int, list[str]]:
    assert [record["step"] for record in got] == list(range(1, STEPS + 1))
    pairs = zip(got, want, strict=True)
    differ = {g["step"]: [key for key in EQUAL if g[key] != w[key]] for g, w in pairs}
    return {step: keys for step, keys in differ.items() if keys}


@pytest.fixture(scope="module")
def whole(config) -> list[dict]:
    return train(config, "whole")


def test_pieces_are_equal_to_the_whole_bit_for_bit(config, whole):
    assert len({record["data/hash"] for record in whole}) == STEPS  # epochs differ, too
    assert differing_steps(train(config, "pieces", STOPS), whole) == {}
    places = {step: cursors_at(config, step) for step in STOPS}
    assert places[6] == {(1, 0, 0, 0)}
    assert places[10] == {(2, 0, 0, 0)}
    assert places[11] == {(2, 0, 1, 0)}


def cursors_at(config: Path, step: int) -> set[tuple[int, ...]]:
    checkpoint = Path(load(config).run.dir) / f"pieces/checkpoints/step-{step:08d}"
    state = json.loads((checkpoint / "state.json").read_text())
    return {tuple(cursor) for cursor in state["cursors"].values()}


@pytest.mark.parametrize(
    ("forget", "differs"), [("a cursor", "data/hash"), ("dropout's generator", "train/loss")]
)
def test_a_resume_that_forgets_something_is_noticed(config, whole, forget, differs):
    name = "forgets-" + differs.replace("/", "-")
    differ = differing_steps(train(config, name, (12,), forget), whole)
    assert min(differ) == 13
    assert differs in differ[13]
