"""What the trainer adds to a bare torch loop: DeepSpeed, metrics, batch hashes, all in one process.

    python -m tests.benchmarks.overhead CONFIG.yaml [key=value ...] [--steps 20]

The two take turns, step by step, on the same rows: a plain loop (forward, backward, clip, AdamW)
and `Trainer.train_step` with its record. Prints the median of each and of their ratio, by pairs.
"""

import argparse
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch

from configs.loader import load
from data_pipeline.batch import collate
from launch.preflight import prepare
from launch.run_folder import STOP
from launch.train import build_trainer
from model.heads import LanguageModel
from model.initialize import initialize
from model.loss import token_loss
from trainer.distributed import world_from_environment
from trainer.engine import init_distributed, parameter_groups
from trainer.metrics import MetricsFile
from trainer.preemption import StopRequest


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_intermixed_args()
    world = world_from_environment()
    prepared = prepare(load(arguments.config, [*arguments.overrides, "run.batch_hash=true"]), 1)
    config = prepared.config
    init_distributed(world, timeout_s=600)

    bare = LanguageModel(config.model, vocab_size=prepared.tokenizer.vocab_size)
    initialize(bare, config.run.seed)
    bare.train()
    adamw = torch.optim.AdamW(
        parameter_groups(bare, config.optimizer.weight_decay), lr=config.optimizer.lr, fused=True
    )
    folder = Path(tempfile.mkdtemp())
    seconds: dict[str, list[float]] = {"bare": [], "trainer": []}
    with MetricsFile(folder / "metrics.jsonl") as metrics:
        trainer = build_trainer(prepared, world, StopRequest(folder / STOP), metrics, None)
        stage = trainer.stages[0]
        with trainer.enter(stage) as (factors, rows), trainer.enter(stage) as (_, bare_rows):
            if factors.accumulation > 1:
                raise ValueError("take engine.device_tokens so that accumulation is 1")
            for _ in range(arguments.steps + 2):
                started = time.perf_counter()
                batch = collate(list(islice(bare_rows, factors.micro_batch)))
                logits = bare.logits(
                    batch.input_ids, batch.positions, batch.lengths, batch.target_index
                )
                loss = token_loss(logits, batch.targets).total / max(1, batch.num_targets)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(bare.parameters(), config.optimizer.clip_norm)
                adamw.step()
                adamw.zero_grad()
                between = time.perf_counter()
                trainer.record(stage, factors, trainer.train_step(stage, factors, rows))
                seconds["trainer"].append(time.perf_counter() - between)
                seconds["bare"].append(between - started)
    timed = {name: values[2:] for name, values in seconds.items()}
    ratios = [t / b for t, b in zip(timed["trainer"], timed["bare"], strict=True)]
    for name, values in timed.items():
        print(f"{name:8} {statistics.median(values) * 1e3:9.1f} ms a step (median)")
    print(f"ratio    {statistics.median(ratios):9.3f} (median of {len(ratios)} pairs)")


if __name__ == "__main__":
    main()
