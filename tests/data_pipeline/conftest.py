"""A small generated corpus, real models trained on it, and real shards of it."""

from pathlib import Path

import numpy as np
import pytest

from data_pipeline.config import TokenizerConfig
from data_pipeline.corpus import Document
from data_pipeline.index import ShardIndex
from data_pipeline.shards import write_shards
from data_pipeline.tokenizers import Tokenizer, load_tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def documents() -> list[Document]:
    """90 documents of invented words, from 1 to about 900 words long."""
    rng = np.random.default_rng(7)
    letters = list("abcdefghijklmnoprstuvwy")
    words = ["".join(rng.choice(letters, size=rng.integers(2, 10))) for _ in range(300)]
    weights = 1 / np.arange(1, 301)
    weights /= weights.sum()
    lengths = (900 * rng.random(90) ** 3).astype(int) + 1
    return [
        Document(f"d{number}", " ".join(rng.choice(words, size=length, p=weights)) + ".")
        for number, length in enumerate(lengths)
    ]


def train(kind: str, folder: Path, documents: list[Document]) -> TokenizerConfig:
    config = TokenizerConfig(kind=kind, model=str(folder / f"{kind}.model"), vocab_size=480)
    train_tokenizer(config, documents)
    return config


@pytest.fixture(scope="session")
def configs(
    tmp_path_factory: pytest.TempPathFactory, documents: list[Document]
) -> dict[str, TokenizerConfig]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: train(kind, folder, documents) for kind in ("unigram", "bpe", "bytes")}


@pytest.fixture(params=["unigram", "bpe", "bytes"])
def any_tokenizer(request: pytest.FixtureRequest, configs: dict[str, TokenizerConfig]) -> Tokenizer:
    return load_tokenizer(configs[request.param])


@pytest.fixture(scope="session")
def tokenizer(configs: dict[str, TokenizerConfig]) -> Tokenizer:
    return load_tokenizer(configs["unigram"])


@pytest.fixture(scope="session")
def index(
    tmp_path_factory: pytest.TempPathFactory, documents: list[Document], tokenizer: Tokenizer
) -> ShardIndex:
    """90 documents in 14 shards: one to three for each of 8 lanes."""
    folder = tmp_path_factory.mktemp("shards") / "train"
    return write_shards(
        documents, tokenizer, folder, seed=3, min_shards=14, shard_mib=64, workers=1
    )
