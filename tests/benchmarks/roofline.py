"""How near a pass over the model comes to the machine's limit: its matrix products alone.

    python -m tests.benchmarks.roofline [--size 12x768] [--dtype fp32 bf16] [--documents 8]
        [--threads 2] [--profile] [--json results.json]

A turn is one forward and backward pass over packed documents (mean 300 tokens, none over 512; 15%
of them targets), then matrix products of several shapes, square ones and the model's own. The share
is counted operations (`model.flops`, matrix products only) a second, over the best product's of the
same turn. The rotary's share of the pass is that of its own passes over all layers, timed in the
same turn; the stacking of dq, dk and dv is in it, which a model without rotation needs too.
`--profile` adds where the rest goes.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from data_pipeline.batch import Batch, collate
from model.flops import training_flops
from model.heads import LanguageModel
from model.initialize import initialize
from tests.benchmarks import rotary
from tests.benchmarks.subjects import (
    DTYPES,
    SIZES,
    draw_lengths,
    example,
    model_config,
    vocabulary,
)
from tests.benchmarks.timing import (
    alternate,
    cpu,
    print_table,
    ratio,
    repeats_for,
    set_threads,
    timed,
    wall,
    write_json,
)

GOALS = {"fp32": 0.85, "bf16": 0.72}


def pack(size: str, documents: int) -> Batch:
    """Return articles of a seed, packed."""
    lengths = draw_lengths("articles", documents)
    vocab_size = vocabulary(size)
    return collate([example(n, number=i, vocab_size=vocab_size) for i, n in enumerate(lengths)])


def build(size: str, dtype: torch.dtype) -> LanguageModel:
    """Return a model in a type, as DeepSpeed would hold it."""
    model = LanguageModel(model_config(size), vocab_size=vocabulary(size))
    initialize(model, 0)
    return model.to(dtype).train()


def one_pass(model: LanguageModel, batch: Batch) -> None:
    """Run forward and backward."""
    loss = model(batch.input_ids, batch.positions, batch.lengths, batch.target_index, batch.targets)
    (loss.total / batch.num_targets).backward()
    for parameter in model.parameters():
        parameter.grad = None


def products(
    size: str, tokens: int, dtype: torch.dtype
) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return matrix products by name, each with its operations: candidates for the peak."""
    width = SIZES[size][1]
    shapes = [(n, n, n) for n in (1024, 2048)] + [(tokens, width, 4 * width)]
    found = {}
    for m, k, n in shapes:
        a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        work = lambda a=a, b=b: torch.nn.functional.linear(a, b)  # noqa: E731
        found[f"{m} x {k} x {n}"] = work, 2 * m * k * n
    return found


def measure(
    size: str, dtype_name: str, *, documents: int, turns: int, seconds: float
) -> dict[str, Any]:
    """Return the share of one size and type."""
    dtype = DTYPES[dtype_name]
    model, batch = build(size, dtype), pack(size, documents)
    config = model.config
    flops = training_flops(config, vocabulary(size), batch.lengths, batch.num_targets)
    candidates = products(size, batch.num_tokens, dtype)
    turn_qkv = turn_of_rotary(model, batch, dtype)
    repeats = {name: repeats_for(work, seconds) for name, (work, _) in candidates.items()}
    sides = {"pass": lambda turn: timed(lambda: one_pass(model, batch))}
    sides["rotary"] = lambda turn: timed(turn_qkv, config.num_layers)
    for name, (work, _) in candidates.items():
        sides[name] = lambda turn, name=name, work=work: timed(work, repeats[name])
    times = alternate(sides, turns)
    row: dict[str, Any] = {"size": size, "dtype": dtype_name, "tokens": batch.num_tokens}
    for clock_name, clock in (("wall", wall), ("cpu", cpu)):
        rates = {
            name: [work[1] / t for t in clock(times[name])] for name, work in candidates.items()
        }
        peaks = [max(turn) for turn in zip(*rates.values(), strict=True)]
        achieved = [flops / t for t in clock(times["pass"])]
        row[f"{clock_name}_share"] = ratio(achieved, peaks)
        row[f"{clock_name}_rotary"] = ratio(
            [config.num_layers * t for t in clock(times["rotary"])], clock(times["pass"])
        )
        row[f"{clock_name}_peak_gflops"] = max(peaks) / 1e9
    return row | {"goal": GOALS[dtype_name]}


def turn_of_rotary(model: LanguageModel, batch: Batch, dtype: torch.dtype) -> Callable[[], Any]:
    """Return one layer's rotation of the pack, forward and backward."""
    config = model.config
    rotation = model.encoder.embeddings.positions.rotation(batch.positions)
    assert rotation is not None
    shape = (batch.num_tokens, 3, config.num_heads, config.head_size)
    qkv, gradient = (torch.randn(shape).to(dtype) for _ in range(2))
    forward, backward = rotary.passes(rotation.split, qkv, gradient)
    return lambda: (forward(), backward())


def profile(size: str, dtype_name: str, documents: int) -> str:
    """Return where a pass's time goes, by torch's operators."""
    model, batch = build(size, DTYPES[dtype_name]), pack(size, documents)
    one_pass(model, batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        one_pass(model, batch)
    averages = profiler.key_averages()
    whole = sum(event.self_cpu_time_total for event in averages)
    largest = sorted(averages, key=lambda event: -event.self_cpu_time_total)[:14]
    return "\n".join(
        f"{event.self_cpu_time_total / whole:6.1%} {event.count:6} {event.key}" for event in largest
    )


def main() -> None:
    """Measure each type."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", choices=SIZES, default="12x768")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--documents", type=int, default=8, help="of 300 tokens on average")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="spent on each product, a turn")
    parser.add_argument("--threads", type=int, help="all cores by default")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    set_threads(arguments.threads)
    rows = [
        measure(
            arguments.size,
            dtype,
            documents=arguments.documents,
            turns=arguments.turns,
            seconds=arguments.seconds,
        )
        for dtype in arguments.dtype
    ]
    share = ["share of the peak", "by processor time", "goal"]
    print_table(
        ["size", "type", "tokens", *share, "rotary's share", *share[1:]],
        [
            [
                *(row["size"], row["dtype"], f"{row['tokens']:,}"),
                *(percents(row["wall_share"]), percents(row["cpu_share"]), f"{row['goal']:.0%}"),
                *(percents(row["wall_rotary"]), percents(row["cpu_rotary"]), "1%"),
            ]
            for row in rows
        ],
    )
    if arguments.profile:
        for dtype in arguments.dtype:
            print(f"\n{dtype}:\n{profile(arguments.size, dtype, arguments.documents)}")
    write_json(arguments.json, rows)


def percents(share: tuple[float, float, float]) -> str:
    """Return a ratio as percents."""
    median, low, high = (f"{100 * value:.1f}" for value in share)
    return f"{median}% ({low}-{high})"


if __name__ == "__main__":
    main()
