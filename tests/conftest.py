"""A tiny project that every test may train on: text, shards by the bytes tokenizer, a config."""

import random
from pathlib import Path

import pytest
import yaml

from data_pipeline.config import TokenizerConfig
from data_pipeline.corpus import Document
from data_pipeline.shards import write_shards
from data_pipeline.tokenizers import load_tokenizer

WORDS = "the state of union is strong and we the people will meet every need of war peace".split()


def make_documents(count: int, seed: int) -> list[Document]:
    """Return documents of random words and very different lengths."""
    rng = random.Random(seed)
    lengths = [rng.choice((3, 20, 120)) for _ in range(count)]
    return [
        Document(f"doc{number}", " ".join(rng.choices(WORDS, k=length)))
        for number, length in enumerate(lengths)
    ]


TINY = {
    "run": {"name": "tiny", "batch_hash": True},
    "tokenizer": {"kind": "bytes"},
    "data": {"lanes": 8},
    "model": {
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "max_positions": 64,
        "dropout": 0.0,
    },
    "curriculum": {
        "stages": [
            {"name": "a", "seq_len": 32, "global_batch": 8, "steps": 5},
            {"name": "b", "seq_len": 64, "global_batch": 4, "steps": 4},
            {"name": "c", "seq_len": 16, "global_batch": 16, "steps": 3},
        ]
    },
    "optimizer": {"lr": 1e-3},
    "engine": {"device_tokens": 128},
    "tracking": {"mlflow": {"uri": None}},
    "checkpoint": {"every_steps": 4, "keep": 9},
}


@pytest.fixture(scope="session")
def tiny_shards(tmp_path_factory) -> Path:
    """Return a folder with train and eval shards."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = load_tokenizer(TokenizerConfig(kind="bytes"))
    for name, count, min_shards in (("train", 60, 8), ("eval", 7, 1)):
        write_shards(
            make_documents(count, seed=len(name)),
            tokenizer,
            folder / name,
            seed=1,
            min_shards=min_shards,
            shard_mib=64,
            workers=1,
        )
    return folder


@pytest.fixture
def tiny_config(tiny_shards, tmp_path) -> Path:
    """Return a config file whose runs go to a folder of their own."""
    data = TINY | {
        "run": {**TINY["run"], "dir": str(tmp_path / "runs")},
        "data": {
            **TINY["data"],
            "train": str(tiny_shards / "train"),
            "eval": str(tiny_shards / "eval"),
        },
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(data))
    return path
