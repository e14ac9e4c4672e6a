"""What the benchmarks measure: documents by a seed, our trainer, and Hugging Face's models.

Documents have log-normal lengths and random ids; a matrix product does not care which.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from configs.schema import Config
from data_pipeline.batch import IGNORED, Example, make_example
from data_pipeline.corpus import Document
from data_pipeline.lanes import START, Row
from data_pipeline.masking import mask_tokens
from data_pipeline.mixture import Mixture
from data_pipeline.seeding import generator
from data_pipeline.shards import write_shards
from data_pipeline.specials import NUM_SPECIALS
from data_pipeline.tokenizers import BytesTokenizer
from launch.assembly import build_trainer
from launch.preflight import Prepared
from launch.run_folder import STOP
from model.config import ModelConfig
from trainer.curriculum import Factors, build_stages
from trainer.distributed import world_from_environment
from trainer.engine import init_distributed
from trainer.loop import Trainer
from trainer.metrics import MetricsFile
from trainer.preemption import StopRequest

SIZES = {  # layers, width, heads, vocabulary
    "tiny": (2, 32, 2, 97),
    "4x256": (4, 256, 4, 8_000),
    "12x768": (12, 768, 12, 50_000),
    "24x1024": (24, 1024, 16, 50_000),
}
CORPORA = {  # median and sigma of the logarithm: the pieces' mean is 130 and 300
    "short": (90.0, 0.89),
    "articles": (300.0, 0.70),
}
LONGEST = 512
MASK_RATE = 0.15
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def model_config(size: str, **changes: Any) -> ModelConfig:
    """Return the model of a size, without dropout."""
    layers, width, heads, _ = SIZES[size]
    sizes = {"num_layers": layers, "hidden_size": width, "num_heads": heads}
    fixed = {"intermediate_size": 4 * width, "max_positions": LONGEST, "dropout": 0.0}
    return ModelConfig(**{**sizes, **fixed, **changes})


def vocabulary(size: str) -> int:
    """Return the rows of its decoder."""
    return SIZES[size][3]


def draw_lengths(corpus: str, count: int, *, longest: int = LONGEST, seed: int = 0) -> list[int]:
    """Return the lengths of `count` pieces: documents, those over `longest` split there."""
    median, sigma = CORPORA[corpus]
    rng, lengths = generator(seed, 1), []
    while len(lengths) < count:
        tokens = max(2, round(float(rng.lognormal(np.log(median), sigma))))
        while tokens > longest:
            lengths.append(longest)
            tokens -= longest
        lengths.append(tokens)
    return [lengths[i] for i in rng.permutation(len(lengths))[:count]]


def example(*lengths: int, number: int, vocab_size: int, seed: int = 0) -> Example:
    """Return row `number`, of documents of these lengths, with its masks: always the same."""
    rng = generator(seed, 2, number)
    ids = rng.integers(NUM_SPECIALS, vocab_size, sum(lengths))
    masked, index = mask_tokens(
        ids,
        lengths,
        np.ones(len(ids), dtype=bool),
        rng,
        rate=MASK_RATE,
        vocab_size=vocab_size,
        whole_word=False,
    )
    return make_example(Row(ids, lengths, 0, START, START), masked, index, ids[index])


def features(examples: Sequence[Example]) -> list[dict[str, list[int]]]:
    """Return the same documents and targets as a data set of Hugging Face's trainer."""
    rows = []
    for one in examples:
        labels = np.full(len(one.input_ids), IGNORED)
        labels[one.target_index] = one.targets
        rows.append({"input_ids": one.input_ids.tolist(), "labels": labels.tolist()})
    return rows


@contextmanager
def our_trainer(
    folder: Path,
    model: ModelConfig,
    vocab_size: int,
    *,
    rows: int,
    seq_len: int,
    batch_hash: bool = False,
    **sections: Any,
) -> Iterator[Trainer]:
    """Yield the trainer that `roformer train` would build, with steps of `rows` rows.

    Its shards hold a word, for `train_step` takes any examples. `sections` are of the config.
    """
    world = world_from_environment()
    stage = {"name": "all", "seq_len": seq_len, "global_batch": rows * world.size, "steps": 10**6}
    config = Config.model_validate(
        {
            "run": {"name": "run", "dir": str(folder), "batch_hash": batch_hash},
            "model": model.model_dump(),
            "data": {"lanes": 1},
            "curriculum": {"stages": [stage]},
            **sections,
        }
    )
    init_distributed(world, timeout_s=600)
    shards = write_shards(
        [Document("one", "word")],
        BytesTokenizer(),
        folder / "shards",
        seed=0,
        min_shards=1,
        shard_mib=1,
        workers=1,
    )
    prepared = Prepared(
        config=config,
        tokenizer=SimpleNamespace(vocab_size=vocab_size),  # type: ignore[arg-type]
        train=Mixture(("",), (shards,), (1.0,)),
        eval=None,
        stages=build_stages(config.curriculum, config.optimizer, config.objective),
        factors=(Factors(rows, 1, world.size),),
        checkpoint=None,
    )
    with MetricsFile(folder / "metrics.jsonl") if world.is_first else nullcontext() as metrics:
        yield build_trainer(prepared, world, StopRequest(folder / STOP), metrics, None)


def train_step(trainer: Trainer, examples: Iterator[Example], rows: int) -> float:
    """Take one step on the next `rows` examples, and record it; return its loss."""
    stage, factors = trainer.stages[0], Factors(rows, 1, trainer.world.size)
    result = trainer.train_step(stage, factors, examples)
    trainer.record(stage, factors, result)
    return result.total / max(result.targets, 1.0)


def their_model(kind: str, config: ModelConfig, vocab_size: int) -> Any:
    """Return RoFormerForMaskedLM or BertForMaskedLM of the same sizes, without dropout."""
    from transformers import BertConfig, BertForMaskedLM, RoFormerConfig, RoFormerForMaskedLM

    config_type, model_type = {
        "roformer": (RoFormerConfig, RoFormerForMaskedLM),
        "bert": (BertConfig, BertForMaskedLM),
    }[kind]
    return model_type(
        config_type(
            vocab_size=vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.max_positions,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def packed_rows(count: int, seq_len: int, *, vocab_size: int, seed: int = 0) -> list[Example]:
    """Return full rows of articles, cut at row ends as lanes do."""
    pieces = iter(draw_lengths("articles", count * seq_len, seed=seed))
    rows, rest = [], 0
    for number in range(count):
        lengths: list[int] = []
        while (room := seq_len - sum(lengths)) > 0:
            piece = rest or next(pieces)
            lengths.append(min(piece, room))
            rest = piece - lengths[-1]
        rows.append(example(*lengths, number=number, vocab_size=vocab_size, seed=seed))
    return rows
