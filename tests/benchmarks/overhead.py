"""What the trainer adds to a bare torch loop: DeepSpeed, metrics, tracking and batch hashes.

    python -m tests.benchmarks.overhead [--size 12x768] [--rows 8] [--zero 0 1 2 3] [--world 2]
        [--dtype fp32] [--steps 5] [--json results.json]

The two take turns, step by step, on the same rows of 512 tokens: a plain loop (forward, backward,
clip, AdamW) and `Trainer.train_step` with its record and the hash of its batch, MLflow's child
process following. With two ranks the plain loop is each rank's own, without communication, so the
ratio has what ZeRO costs; a rank has one thread then. The parts of a step, from the same turns, are
told as percents of the plain loop's step.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data_pipeline.batch import Example, collate
from model.heads import LanguageModel
from model.initialize import initialize
from tests.benchmarks.subjects import (
    DTYPES,
    SIZES,
    model_config,
    our_trainer,
    packed_rows,
    train_step,
    vocabulary,
)
from tests.benchmarks.timing import (
    Stopwatch,
    Time,
    alternate,
    cpu,
    print_table,
    ratio,
    set_threads,
    wall,
    write_json,
)
from tests.ranks import run_ranks
from trainer.config import MlflowConfig
from trainer.distributed import barrier
from trainer.engine import parameter_groups
from trainer.loop import Trainer
from trainer.tracking import Tracker

PARTS = {"forward": "forward", "backward": "backward", "step": "clip, update"}
SEQ_LEN = 512
OPTIMIZER = {"lr": 1e-4, "clip_norm": 1.0}


class Parts:
    """Adds up the processor time of a step's parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, name: str) -> None:
        """Time a method of an object from now on."""
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds[name] += time.process_time() - started

        setattr(owner, name, timed)


class Bare:
    """The plain loop."""

    def __init__(self, size: str, seed: int, dtype: str) -> None:
        self.model = LanguageModel(model_config(size), vocab_size=vocabulary(size))
        initialize(self.model, seed)
        self.model.train()
        groups = parameter_groups(self.model, weight_decay=0.01)
        self.adamw = torch.optim.AdamW(groups, lr=OPTIMIZER["lr"], fused=True)
        self.low = dtype != "fp32"

    def train_step(self, examples: Iterator[Example], rows: int) -> None:
        batch = collate([next(examples) for _ in range(rows)])
        self.backward(self.forward(batch))
        self.step()

    def forward(self, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.low):
            loss = self.model(
                batch.input_ids, batch.positions, batch.lengths, batch.target_index, batch.targets
            )
        return loss.total / batch.num_targets

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER["clip_norm"])
        self.adamw.step()
        self.adamw.zero_grad()


def measure(
    size: str,
    dtype: str,
    zero_stage: int,
    *,
    rows: int,
    steps: int,
    threads: int | None,
    tracking: bool = True,
) -> dict[str, Any]:
    """Return one stage's ratio and parts, as this rank sees them."""
    set_threads(threads)
    examples = packed_rows(rows, SEQ_LEN, vocab_size=vocabulary(size))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        uri = f"sqlite:///{folder}/mlflow.db" if tracking else None
        tracker = Tracker(folder, MlflowConfig(uri=uri))
        with our_trainer(
            folder,
            model_config(size),
            vocabulary(size),
            rows=rows,
            seq_len=SEQ_LEN,
            optimizer=OPTIMIZER,
            engine={"precision": dtype, "zero_stage": zero_stage},
            batch_hash=True,
        ) as trainer:
            bare = Bare(size, trainer.settings.seed, dtype)
            parts = {"bare": Parts(), "trainer": Parts()}
            watch_parts(bare, trainer, parts)

            def bare_turn(turn: int) -> Time:
                barrier()
                with Stopwatch() as watch:
                    bare.train_step(iter(examples), rows)
                return watch.time

            def trainer_turn(turn: int) -> Time:
                barrier()
                with Stopwatch() as watch:
                    train_step(trainer, iter(examples), rows)
                return watch.time

            if trainer.world.is_first:
                tracker.start()
            times = alternate({"bare": bare_turn, "trainer": trainer_turn}, steps, warmup=2)
            tracker.close("FINISHED")
    whole = sum(cpu(times["bare"])) / steps
    shares = {
        side: {part: seconds / (steps + 2) / whole for part, seconds in kept.seconds.items()}
        for side, kept in parts.items()
    }
    return {
        "zero_stage": zero_stage,
        "ratio": ratio(wall(times["trainer"]), wall(times["bare"])),
        "cpu_ratio": ratio(cpu(times["trainer"]), cpu(times["bare"])),
        "parts": shares,
    }


def watch_parts(bare: Bare, trainer: Trainer, parts: dict[str, Parts]) -> None:
    """Time the parts of both steps."""
    for name in PARTS:
        parts["bare"].wrap(bare, name)
    parts["trainer"].wrap(trainer, "forward")
    parts["trainer"].wrap(trainer.engine, "backward")
    parts["trainer"].wrap(trainer.engine, "step")


def main() -> None:
    """Measure each stage with ranks of its own."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", choices=SIZES, default="12x768")
    parser.add_argument("--rows", type=int, default=8, help="of 512 tokens, a rank and step")
    parser.add_argument("--zero", type=int, nargs="+", choices=range(4), default=[0, 1, 2, 3])
    parser.add_argument("--world", type=int, nargs="+", default=[1])
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of one rank; all cores by default")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = []
    for world in arguments.world:
        for stage in arguments.zero:
            threads = 1 if world > 1 else arguments.threads
            work = partial(measure, rows=arguments.rows, steps=arguments.steps, threads=threads)
            row = run_ranks(world, work, arguments.size, arguments.dtype, stage, timeout_s=7200)[0]
            found.append({"world": world, "size": arguments.size, "dtype": arguments.dtype, **row})
    parts = [f"{label}: bare, trainer" for label in PARTS.values()]
    print_table(
        ["ranks", "ZeRO", "step over bare", "by processor time", *parts],
        [
            [row["world"], row["zero_stage"], row["ratio"].digits(3), row["cpu_ratio"].digits(3)]
            + [f"{row['parts']['bare'][p]:.1%}, {row['parts']['trainer'][p]:.1%}" for p in PARTS]
            for row in found
        ],
    )
    write_json(arguments.json, found)


if __name__ == "__main__":
    main()
