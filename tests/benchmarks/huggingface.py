"""Our trainer against transformers' Trainer: real tokens a second, on the same documents.

    python -m tests.benchmarks.huggingface [--size 4x256] [--model roformer] [--dtype bf16]
        [--corpus short] [--batch 8] [--steps 4] [--turns 5] [--json results.json]

Theirs is stock: Trainer with its AdamW, DataCollatorForTokenClassification (which pads ids and
labels to the longest of a batch), RoFormerForMaskedLM or BertForMaskedLM; bf16 is its autocast,
8 documents a batch its default. Its batches are random, or those of its own length grouping. Ours
is what `roformer train` runs: packed documents under DeepSpeed (without ZeRO, as one process has
nothing to share out), `Trainer.train_step` and its metrics. Neither has dropout. Both start from
the same weights, and masks are made before, so that both have the same targets.

They take turns by groups of optimizer steps on exactly the same documents, `--batch` a step. On
random batches the steps are the same too, and so must be the losses: the last column has the
largest difference. Length-grouped steps are drawn evenly from a whole mega-batch of the sampler
(50 batches sorted by length); we train on the group's documents in random order, as we always do.

Padding is not counted, so the ratio of tokens a second is that of the times.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_pipeline.batch import Example
from data_pipeline.seeding import generator
from model.heads import LanguageModel
from model.huggingface import to_huggingface
from model.initialize import initialize
from tests.benchmarks.subjects import (
    CORPORA,
    LONGEST,
    SIZES,
    draw_lengths,
    example,
    features,
    model_config,
    our_trainer,
    their_model,
    train_step,
    vocabulary,
)
from tests.benchmarks.timing import (
    Ratio,
    Stopwatch,
    Time,
    alternate,
    cpu,
    print_rows,
    print_table,
    ratio,
    set_threads,
    wall,
    write_json,
)
from trainer.loop import Trainer

ROOT = Path(__file__).parents[2]
OPTIMIZER = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 0.0, "clip_norm": 1.0}
POSITIONS = {"roformer": "rope", "bert": "learned"}
GOALS = {("short", "random"): 4.0, ("articles", "random"): 2.2}
GOALS |= {("short", "grouped"): 2.0, ("articles", "grouped"): 1.6}
COLUMNS = ("size", "against", "type", "documents", "batches", "padded/real", "times as fast")
COLUMNS += ("by processor time", "goal", "losses differ by")
MEGA_BATCH = 50  # batches that the sampler sorts together

Documents = list[int]  # by number


class Theirs:
    """transformers' Trainer, called once a group of steps; it keeps its weights and optimizer."""

    def __init__(self, model: Any, folder: Path, *, batch: int, dtype: str) -> None:
        import transformers
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import (
            DataCollatorForTokenClassification,
            PreTrainedTokenizerFast,
            PrinterCallback,
            TrainerCallback,
            TrainingArguments,
        )
        from transformers.utils import logging

        class Epoch(TrainerCallback):
            """Times the steps and the loading of their batches, without what `train` sets up."""

            def on_epoch_begin(self, *_: Any, **__: Any) -> None:
                self.watch = Stopwatch().__enter__()

            def on_epoch_end(self, *_: Any, **__: Any) -> None:
                self.watch.__exit__()

        logging.set_verbosity_error()
        words = WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="[PAD]")
        arguments = TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=batch,
            num_train_epochs=1,
            learning_rate=OPTIMIZER["lr"],
            adam_epsilon=OPTIMIZER["eps"],
            weight_decay=OPTIMIZER["weight_decay"],
            max_grad_norm=OPTIMIZER["clip_norm"],
            lr_scheduler_type="constant",
            bf16=dtype == "bf16",
            use_cpu=not torch.cuda.is_available(),
            train_sampling_strategy="sequential",  # the documents come in the sampler's order
            dataloader_pin_memory=torch.cuda.is_available(),
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        self._epoch = Epoch()
        self._trainer = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=[],
            data_collator=DataCollatorForTokenClassification(tokenizer),
            callbacks=[self._epoch],
        )
        self._trainer.remove_callback(PrinterCallback)

    def train(self, rows: list[dict[str, list[int]]]) -> tuple[Time, float]:
        """Train on the rows in order; return the time, and the mean of the steps' losses."""
        self._trainer.train_dataset = rows
        loss = self._trainer.train().training_loss
        return self._epoch.watch.time, loss


def random_groups(turns: int, steps: int, batch: int) -> list[Documents]:
    """Return the documents of each turn where batches are random."""
    size = steps * batch
    return [list(range(turn * size, (turn + 1) * size)) for turn in range(turns)]


def grouped_by_length(
    lengths: Sequence[int], turns: int, steps: int, batch: int
) -> list[Documents]:
    """Return those of their length grouping: steps from all over the sampler's second mega-batch.

    (Its first begins with the longest of all documents.)
    """
    from transformers.trainer_pt_utils import LengthGroupedSampler

    seeded = torch.Generator().manual_seed(0)
    order = list(LengthGroupedSampler(batch, lengths=list(lengths), generator=seeded))
    count = turns * steps
    mega = min(MEGA_BATCH, len(lengths) // (4 * batch))
    if count > mega:
        raise ValueError(f"{count} steps are more than the {mega} batches of a mega-batch")
    places = [mega + int((i + 0.5) * mega / count) for i in range(count)]
    batches = [order[place * batch : (place + 1) * batch] for place in places]
    return [list(itertools.chain(*batches[turn::turns])) for turn in range(turns)]


@contextmanager
def both_sides(
    size: str, kind: str, dtype: str, *, batch: int, threads: int | None
) -> Iterator[tuple[Theirs, Trainer]]:
    """Yield the two trainers, with the same weights."""
    config, vocab_size = model_config(size, positions=POSITIONS[kind]), vocabulary(size)
    sections = {"optimizer": OPTIMIZER, "engine": {"precision": dtype, "zero_stage": 0}}
    with tempfile.TemporaryDirectory() as folder:
        model = their_model(kind, config, vocab_size)
        # before our process group is there, which would make it a distributed trainer
        theirs = Theirs(model, Path(folder), batch=batch, dtype=dtype)
        set_threads(threads)
        sizes = {"rows": batch, "seq_len": LONGEST}
        with our_trainer(Path(folder), config, vocab_size, **sizes, **sections) as ours:
            start = LanguageModel(config, vocab_size=vocab_size)
            initialize(start, ours.settings.seed)
            model.load_state_dict(to_huggingface(start.state_dict(), config))
            del start
            yield theirs, ours


def measure(
    size: str,
    kind: str,
    dtype: str,
    corpus: str,
    *,
    batch: int,
    steps: int,
    turns: int,
    threads: int | None,
) -> list[dict[str, Any]]:
    """Return the rows of one cell: random batches, then length-grouped ones."""
    lengths = draw_lengths(corpus, 4 * MEGA_BATCH * batch)
    groups = {
        "random": random_groups(turns, steps, batch),
        "grouped": grouped_by_length(lengths, turns, steps, batch),
    }
    cell = {"size": size, "model": kind, "dtype": dtype, "corpus": corpus}
    with both_sides(size, kind, dtype, batch=batch, threads=threads) as (theirs, ours):
        return [
            {
                **cell,
                "batches": batches,
                "goal": GOALS[corpus, batches],
                "padded_to_real": padded_to_real(lengths, groups[batches], batch),
                **in_turns(
                    theirs,
                    ours,
                    [documents_of(group, lengths, vocabulary(size)) for group in groups[batches]],
                    batch=batch,
                    shuffled=batches == "grouped",
                ),
            }
            for batches in groups
        ]


def in_turns(
    theirs: Theirs, ours: Trainer, groups: list[list[Example]], *, batch: int, shuffled: bool
) -> dict[str, Any]:
    """Let both train on each group, we on `shuffled` documents; return how they compare."""
    losses: dict[str, list[float]] = {"theirs": [], "ours": []}

    def their_turn(turn: int) -> Time:
        taken, loss = theirs.train(features(groups[max(turn, 0)]))
        losses["theirs"].append(loss)
        return taken

    def our_turn(turn: int) -> Time:
        group = groups[max(turn, 0)]
        order = generator(turn + 1).permutation(len(group)) if shuffled else range(len(group))
        waiting = iter([group[n] for n in order])
        with Stopwatch() as watch:
            taken = [train_step(ours, waiting, batch) for _ in range(len(group) // batch)]
        losses["ours"].append(sum(taken) / len(taken))
        return watch.time

    times = alternate({"theirs": their_turn, "ours": our_turn}, len(groups))
    apart = [abs(a - b) for a, b in zip(*losses.values(), strict=True)]
    return {
        "ratio": ratio(wall(times["theirs"]), wall(times["ours"])),
        "cpu_ratio": ratio(cpu(times["theirs"]), cpu(times["ours"])),
        "loss_difference": None if shuffled else max(apart),
    }


def documents_of(numbers: Documents, lengths: Sequence[int], vocab_size: int) -> list[Example]:
    """Return documents with their masks."""
    return [example(lengths[n], number=n, vocab_size=vocab_size) for n in numbers]


def padded_to_real(lengths: Sequence[int], groups: list[Documents], batch: int) -> float:
    """Return the tokens that they compute over those that there are."""
    of = np.array(lengths)[np.concatenate(groups)].reshape(-1, batch)
    return float(batch * of.max(axis=1).sum() / of.sum())


def main() -> None:
    """Measure each combination in a process of its own, and print a row as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["4x256", "12x768"])
    parser.add_argument("--model", nargs="+", choices=POSITIONS, default=list(POSITIONS))
    parser.add_argument("--dtype", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--corpus", nargs="+", choices=CORPORA, default=list(CORPORA))
    parser.add_argument("--batch", type=int, default=8, help="documents a step")
    parser.add_argument("--steps", type=int, default=4, help="steps a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, help="all cores by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    same = {key: getattr(arguments, key) for key in ("batch", "steps", "turns", "threads")}
    cells = itertools.product(arguments.size, arguments.model, arguments.dtype, arguments.corpus)
    if arguments.one:
        return print(json.dumps(measure(*next(cells), **same)))
    found = []
    print_table(COLUMNS, [])
    for cell in cells:
        options = [f"--{key}={value}" for key, value in same.items() if value is not None]
        named = zip(("size", "model", "dtype", "corpus"), cell, strict=True)
        options += [f"--{key}={value}" for key, value in named]
        command = [sys.executable, "-m", "tests.benchmarks.huggingface", "--one", *options]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        rows = json.loads(done.stdout.splitlines()[-1])
        print_rows([as_cells(row) for row in rows])
        found += rows
        write_json(arguments.json, found)
    return None


def as_cells(row: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    ratios = [Ratio(*row[key]) for key in ("ratio", "cpu_ratio")]
    apart = row["loss_difference"]
    return [
        *(row[key] for key in ("size", "model", "dtype", "corpus", "batches")),
        f"{row['padded_to_real']:.2f}",
        *map(str, ratios),
        f"{row['goal']:.1f}",
        "" if apart is None else f"{apart:.0e}",
    ]


if __name__ == "__main__":
    main()
