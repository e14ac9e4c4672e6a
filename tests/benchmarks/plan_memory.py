"""Memory as `roformer plan` says it, and as ranks on CPUs measure it.

    python -m tests.benchmarks.plan_memory [--precision bf16] [--turns 3]
    python -m tests.benchmarks.plan_memory --sizes "86 M" --ranks 1 --zero 0 --turns 9

Three sizes of model, ZeRO 0 to 3, one and two ranks: 24 cases of four steps, some minutes a turn.
A case is measured once a turn, and its row gives the median and the range.
"""

import argparse
import itertools
import statistics
import subprocess
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
VOCAB_SIZE = load_tokenizer(TokenizerConfig(kind="bytes")).vocab_size


def main() -> None:
    """Print predicted and measured memory of every case, as rows of Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=tuple(SIZES))
    parser.add_argument("--ranks", nargs="+", type=int, default=(1, 2))
    parser.add_argument("--zero", nargs="+", type=int, choices=range(4), default=range(4))
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--turns", type=int, default=1)
    arguments = parser.parse_args()
    print("| parameters | ranks | ZeRO | planned MiB | measured MiB | |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = write_project(folder)
        cases = itertools.product(arguments.sizes, arguments.ranks, arguments.zero)
        for size, world, stage in cases:
            words = overrides(size, world, stage, arguments.accumulation)
            words += [f"run.dir={folder}", f"engine.precision={arguments.precision}"]
            plan = make_plan(load(config, words), world=world, vocab_size=VOCAB_SIZE)
            planned = plan.fullest.memory.device / 2**20
            peaks = sorted(measure(config, words, folder) for _ in range(arguments.turns))
            measured = statistics.median(peaks)
            spread = f" ({peaks[0]:,.0f}-{peaks[-1]:,.0f})" if len(peaks) > 1 else ""
            print(
                f"| {size} | {world} | {stage} | {planned:,.0f} | {measured:,.0f}{spread} "
                f"| {planned / measured - 1:+.1%} |",
                flush=True,
            )


def write_project(folder: Path) -> Path:
    """Write shards and the config of every case."""
    tokenizer = load_tokenizer(TokenizerConfig(kind="bytes"))
    write_shards(
        *(make_documents(60, seed=5), tokenizer, folder / "shards"),
        **{"seed": 1, "min_shards": 8, "shard_mib": 64, "workers": 1},
    )
    config = folder / "config.yaml"
    data = {"lanes": 8, "train": str(folder / "shards")}
    config.write_text(yaml.safe_dump(TINY | {"data": data}))
    return config


def overrides(size: str, world: int, stage: int, accumulation: int) -> list[str]:
    """Return what a case's config has of its own."""
    layers, width, tokens = SIZES[size]
    return [
        *("run.name=case", "checkpoint.every_steps=0", f"launch.num_processes={world}"),
        *(f"model.num_layers={layers}", f"model.hidden_size={width}"),
        *(f"model.num_heads={width // 64}", f"model.intermediate_size={4 * width}"),
        *(f"engine.zero_stage={stage}", f"engine.device_tokens={tokens}"),
        "curriculum.stages=[{name: a, seq_len: 64, steps: 4, "
        f"global_batch: {tokens // 64 * world * accumulation}}}]",
    ]


def measure(config: Path, words: list[str], folder: Path) -> float:
    """Train, and return the peak of the fullest rank in MiB."""
    done = roformer("train", config, *words)
    assert done.returncode == 0, done.stdout
    peak = read_records(folder / "case")[-1]["memory/peak_gib"] * 1024
    subprocess.run(["rm", "-r", str(folder / "case")], check=True)
    return float(peak)


if __name__ == "__main__":
    main()
