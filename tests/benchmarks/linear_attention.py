"""Time and memory of the attention core by length: linear attention beside softmax.

    python -m tests.benchmarks.linear_attention [--tokens 1024 2048] [--dtype bf16] [--favor 256]

Forward and backward of one causal core with rope, 12 heads of 64, one document; q, k, v in, their
gradients out. Each number comes from a process of its own: the least time a 1,000 tokens, and the
most memory over what was held before (the process's on a CPU, torch's on a GPU). On a CPU it is the
processor time of one thread, so that others on the machine do not count.

One thread of a busy, shared Zen 4 server, fp32, favor with 256 features (the first rows' memory has
the libraries' own in it):

| tokens | softmax ms/1k | MiB/1k | elu ms/1k | MiB/1k | favor ms/1k | MiB/1k |
|---|---|---|---|---|---|---|
| 1,024 | 119.6 | 68 | 64.8 | 133 | 242.0 | 315 |
| 2,048 | 184.4 | 47 | 77.0 | 117 | 238.7 | 235 |
| 4,096 | 378.0 | 34 | 71.5 | 104 | 285.5 | 207 |
| 8,192 | 694.9 | 32 | 76.9 | 89 | 264.9 | 173 |
| 16,384 | 1368.1 | 24 | 83.3 | 86 | 283.3 | 169 |
| 32,768 | 2735.4 | 23 | 105.4 | 59 | 404.3 | 121 |

From 1,024 to 32,768 tokens the work a token is the same (tests/model/test_linear_attention.py); the
rest is cache, and memory that glibc hands back and gets again: one head's 256 features reach its
limit of 32 MiB at 32,768 tokens.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

from model.attention import CORES
from model.config import ModelConfig
from model.pack import Pack
from model.positions import RotaryPositions

ROOT = Path(__file__).parents[2]
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure(
    kind: str, tokens: int, *, num_features: int, dtype: torch.dtype, causal: bool, seconds: float
) -> tuple[float, float]:
    """Return (ms a 1,000 tokens, MiB) of one kind at one length."""
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    linear = {"attention": "linear", "features": kind, "num_features": num_features}
    config = ModelConfig.model_validate(
        {"max_positions": tokens, **(linear if kind != "softmax" else {})}
    )
    core = CORES[config.attention](config, causal=causal)
    rotate = RotaryPositions(config).rotation(torch.arange(tokens, device=device))
    qkv = torch.randn(tokens, 3, 12, 64, dtype=dtype, device=device, requires_grad=True)
    gradient = torch.randn(tokens, 12, 64, dtype=dtype, device=device)

    def step() -> float:
        _wait(device)
        started = clock()
        core(*qkv.unbind(1), rotate=rotate, pack=Pack((tokens,))).backward(gradient)
        _wait(device)
        qkv.grad = None
        return clock() - started

    held = _peak_mib(device)
    first = step()
    memory = _peak_mib(device) - held
    times = [step() for _ in range(max(2, min(50, int(seconds / first))))]
    return 1e6 * min(times) / tokens, memory


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _peak_mib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def table(arguments: argparse.Namespace) -> None:
    """Print a row a length, each number measured in a process of its own."""
    kinds = ["softmax", "elu", *(["favor"] if arguments.favor else [])]
    units = [unit for kind in kinds for unit in (f"{kind} ms/1k", "MiB/1k")]
    print("| tokens | " + " | ".join(units) + " |")
    print("|---" * (1 + len(units)) + "|")
    for tokens in arguments.tokens:
        numbers = []
        for kind in kinds:
            options = [f"--one={kind}", f"--tokens={tokens}", f"--dtype={arguments.dtype}"]
            options += [f"--favor={arguments.favor}", f"--seconds={arguments.seconds}"]
            options += ["--bidirectional"] * arguments.bidirectional
            command = [sys.executable, "-m", "tests.benchmarks.linear_attention", *options]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            ms, mib = json.loads(done.stdout)
            numbers += [f"{ms:.1f}", f"{mib * 1000 / tokens:.0f}"]
        print(f"| {tokens:,} | " + " | ".join(numbers) + " |", flush=True)


def main() -> None:
    """Measure one kind, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--favor", type=int, default=256, help="random features; 0: none")
    parser.add_argument("--bidirectional", action="store_true")
    parser.add_argument("--seconds", type=float, default=3.0, help="time spent on each number")
    parser.add_argument("--one", choices=("softmax", "elu", "favor"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is None:
        return table(arguments)
    result = measure(
        arguments.one,
        arguments.tokens[0],
        num_features=arguments.favor or 256,
        dtype=DTYPES[arguments.dtype],
        causal=not arguments.bidirectional,
        seconds=arguments.seconds,
    )
    return print(json.dumps(result))


if __name__ == "__main__":
    main()
