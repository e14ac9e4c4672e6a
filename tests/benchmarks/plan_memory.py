"""Memory as `roformer plan` says it, and as ranks on CPUs measure it.

    python -m tests.benchmarks.plan_memory [fp32|bf16]

Three sizes of model, ZeRO 0 to 3, one and two ranks: 24 runs of four steps, some minutes.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from configs.loader import load
from data_pipeline.config import TokenizerConfig
from data_pipeline.shards import write_shards
from data_pipeline.tokenizers import load_tokenizer
from launch.plan import make_plan
from tests.conftest import TINY, make_documents
from tests.integration.processes import read_records, roformer

SIZES = {"3 M": (4, 256, 2048), "26 M": (8, 512, 2048), "86 M": (12, 768, 1024)}
"""Parameters: layers, hidden size, tokens of a micro-batch."""


def measure(folder: Path, precision: str) -> None:
    """Print predicted and measured memory of every case, as rows of Markdown."""
    tokenizer = load_tokenizer(TokenizerConfig(kind="bytes"))
    write_shards(
        *(make_documents(60, seed=5), tokenizer, folder / "shards"),
        **{"seed": 1, "min_shards": 8, "shard_mib": 64, "workers": 1},
    )
    config = folder / "config.yaml"
    data = {"lanes": 8, "train": str(folder / "shards")}
    config.write_text(yaml.safe_dump(TINY | {"data": data}))
    print("| parameters | ranks | ZeRO | planned MiB | measured MiB | |\n|---|---|---|---|---|---|")
    for size, (layers, width, tokens) in SIZES.items():
        for world in (1, 2):
            for stage in range(4):
                words = [
                    *(f"run.dir={folder}", f"run.name=r{layers}-{world}-{stage}"),
                    *(f"model.num_layers={layers}", f"model.hidden_size={width}"),
                    *(f"model.num_heads={width // 64}", f"model.intermediate_size={4 * width}"),
                    *(f"engine.zero_stage={stage}", f"engine.device_tokens={tokens}"),
                    *(f"launch.num_processes={world}", "checkpoint.every_steps=0"),
                    f"engine.precision={precision}",
                    "curriculum.stages=[{name: a, seq_len: 64, steps: 4, "
                    f"global_batch: {tokens // 64 * world}}}]",
                ]
                done = roformer("train", config, *words)
                assert done.returncode == 0, done.stdout
                run = folder / f"r{layers}-{world}-{stage}"
                measured = read_records(run)[-1]["memory/peak_gib"] * 1024
                subprocess.run(["rm", "-r", str(run / "checkpoints")], check=True)
                plan = make_plan(load(config, words), world=world, vocab_size=tokenizer.vocab_size)
                planned = plan.fullest.memory.device / 2**20
                error = f"{planned / measured - 1:+.1%}"
                print(
                    f"| {size} | {world} | {stage} | {planned:,.0f} | {measured:,.0f} | {error} |"
                )
                sys.stdout.flush()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        measure(Path(temporary), (sys.argv[1:] or ["fp32"])[0])
