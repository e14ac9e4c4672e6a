"""What must hold before a run starts: data, tokenizer, machine and run folder fit the config.

Everything wrong is found at once, in seconds, before any process group forms or any file is
written.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from configs.loader import ConfigError
from configs.schema import Config
from data_pipeline.config import DataConfig
from data_pipeline.foreign import ForeignShards, first_document
from data_pipeline.index import ShardIndex
from data_pipeline.loader import check_split
from data_pipeline.mixture import Mixture
from data_pipeline.opening import open_reading, open_shards
from data_pipeline.reading import Reading, Shards
from data_pipeline.tokenizers import BytesTokenizer, Tokenizer, load_tokenizer
from launch.run_folder import CHECKPOINTS, data_problems, folder_of, folder_problems
from trainer import checkpoint
from trainer.curriculum import Factors, Stage, batch_factors, build_stages


@dataclass(frozen=True)
class Prepared:
    """A config and what it names, read and found to fit together."""

    config: Config
    tokenizer: Tokenizer
    train: Mixture
    eval: Shards | None
    stages: tuple[Stage, ...]
    factors: tuple[Factors, ...]
    """How each stage's batch is cut on this world."""
    checkpoint: Path | None
    """Where the run goes on from, by sizes alone; None: it starts afresh."""
    hosts: tuple[str, ...] = ()
    """Where its ranks are, in rank order, each once."""


def fingerprints(tokenizer: Tokenizer, train: Mixture, held_out: Shards | None) -> dict[str, Any]:
    """Return the hashes by which a run knows that it goes on with the same data."""
    data: dict[str, Any] = {"train": train.sha256, "eval": held_out and held_out.sha256}
    if len(train.sources) > 1:
        data["shares"] = train.shares_by_name
    return {"tokenizer": tokenizer.sha256, "data": data}


def local_processes(config: Config) -> int:
    """Return the number of ranks on this machine: no more than it has GPUs, where it has any."""
    wanted, gpus = config.launch.num_processes, torch.cuda.device_count()
    if wanted == "auto":
        return max(1, gpus)
    return min(wanted, gpus) if gpus else wanted


def prepare(config: Config, world: int, *, new_run: bool = True, here: bool = True) -> Prepared:
    """Read what a config names, and check that `world` ranks can train on it.

    Without `new_run` the run's folder is left out of it; without `here` this machine's devices,
    since the ranks run on others.

    Raises:
        ConfigError: With everything that is wrong.
    """
    problems: list[str] = []

    def attempt(read, *args):  # type: ignore[no-untyped-def]
        try:
            return read(*args)
        except (ValueError, OSError) as error:
            problems.append(str(error))
            return None

    stages = build_stages(config.curriculum, config.optimizer, config.objective)
    tokenizer = attempt(load_tokenizer, config.tokenizer)
    reading = open_reading(config.data)
    read = partial(_open, config.data.text_key, tokenizer, reading, problems)
    sources = [
        attempt(read, f"data.train{f'.{number}' * bool(source.name)}", source.shards)
        for number, source in enumerate(config.data.sources)
    ]
    train: Any = None if None in sources else _mixture(config.data, sources)
    held_out = attempt(read, "data.eval", config.data.eval) if config.data.eval else None
    attempt(check_split, config.data.lanes, world, config.data.workers)
    factors = [attempt(_factors, stage, config, world) for stage in stages]
    if here and config.engine.precision == "fp16" and not torch.cuda.is_available():
        problems.append("engine.precision: fp16 needs a GPU; take bf16 or fp32 on a CPU")
    if here and config.engine.compile and not (torch.cuda.is_available() or _compiler()):
        problems.append(
            "engine.compile: torch.compile needs a C++ compiler on a CPU, and there is no g++; "
            "install one (or name yours in CXX), or set it to false"
        )
    if new_run:
        problems += folder_problems(config)
    if new_run and tokenizer is not None and train is not None:
        problems += data_problems(config, fingerprints(tokenizer, train, held_out))
    resume_from = attempt(_resume_from, config) if new_run else None
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return Prepared(config, tokenizer, train, held_out, stages, tuple(factors), resume_from)


def _resume_from(config: Config) -> Path | None:
    root = folder_of(config) / CHECKPOINTS
    return checkpoint.find(root, config.checkpoint.resume, in_full=False)


def _open(
    text_key: str,
    tokenizer: Tokenizer | None,
    reading: Reading,
    problems: list[str],
    key: str,
    source: str,
) -> Shards | None:
    """Open a source, and look at as much of it as takes no time."""
    if not source:
        raise ValueError(f"{key} names no shards; write some by `roformer shards`, or name theirs")
    shards = open_shards(source, tokenizer or BytesTokenizer(), text_key, reading)
    if isinstance(shards, ForeignShards):
        first_document(shards)
    elif isinstance(shards, ShardIndex):
        problems += _shard_problems(key, shards)
        problems += _tokenizer_problems(key, shards, tokenizer) if tokenizer else ()
    return shards


def _mixture(data: DataConfig, sources: list[Shards]) -> Mixture:
    names = tuple(source.name for source in data.sources)
    weights = tuple(source.weight for source in data.sources)
    return Mixture(names, tuple(sources), weights, data.packing)


def _shard_problems(key: str, index: ShardIndex) -> Iterator[str]:
    """Look at every shard's size; `roformer verify` and training look at every byte."""
    if index.base:
        return  # each is looked at when it comes over the network
    for number, shard in enumerate(index.shards):
        path = index.path(number)
        if not path.is_file():
            yield f"{key}: {path} is missing"
        elif path.stat().st_size != shard.bytes:
            yield (
                f"{key}: {path} has {path.stat().st_size} bytes, and its index says {shard.bytes}"
            )


def _tokenizer_problems(key: str, index: ShardIndex, tokenizer: Tokenizer) -> Iterator[str]:
    if index.tokenizer_sha256 != tokenizer.sha256:
        yield (
            f"{key}: {index.folder} was written with another tokenizer ({index.tokenizer_kind}, "
            f"sha256 {index.tokenizer_sha256[:12]}; tokenizer.model has {tokenizer.sha256[:12]}): "
            "name the right one, or write the shards again"
        )


def _factors(stage: Stage, config: Config, world: int) -> Factors:
    try:
        return batch_factors(
            seq_len=stage.seq_len,
            global_batch=stage.global_batch,
            world=world,
            device_tokens=config.engine.device_tokens,
        )
    except ValueError as error:
        raise ValueError(f"curriculum stage {stage.name}: {error}") from None


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))
