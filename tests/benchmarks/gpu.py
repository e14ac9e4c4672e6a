"""Everything that only a GPU can show, in one command of minutes.

    python -m tests.benchmarks.gpu [--json gpu.json]

- values of the rotary kernel and of attention, against fp64
- bandwidth of the rotary kernel as a share of a device copy measured in the same run; beside it the
  kernels of flash-attn and Liger, where they are installed
- attention over packed documents against torch's own on padded ones
- training steps (forward, backward, fused AdamW, bf16 weights): tokens/s, MFU of the peak that
  matrix products reach in the same run and of the data sheet's, and the ratio to Hugging Face's
  RoFormer on the same full rows, where transformers is installed

Where a figure cannot be had, its row says why, and the exit code is 1; it is 2 without a GPU.
`--device cpu --tiny` runs every function in seconds, to test them; its numbers mean nothing.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from data_pipeline.batch import Batch, collate
from model.flops import training_flops
from model.heads import LanguageModel
from model.initialize import initialize
from model.kernels.attention import attend
from model.kernels.rotary import rotate_, rotate_gather
from model.pack import Pack
from tests.benchmarks.subjects import (
    draw_lengths,
    example,
    model_config,
    their_model,
    vocabulary,
)
from tests.benchmarks.timing import (
    Time,
    alternate,
    print_rows,
    print_table,
    ratio,
    repeats_for,
    timed,
    wall,
    write_json,
)
from tests.model.kernels.cases import error, exact_packed, pack, positions_of, turns_of

DATA_SHEET = {  # dense bf16 FLOP/s, by a part of the device's name; the first that fits
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
}


class Figure(NamedTuple):
    """A row of the table."""

    what: str
    case: str
    result: str
    goal: str = ""


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    device: torch.device
    dtype: torch.dtype
    tokens: int
    heads: int
    head_size: int
    sizes: tuple[str, ...]
    lengths: tuple[int, ...]
    turns: int
    seconds: float
    """Of each turn of a kernel."""


def full(device: torch.device) -> Scale:
    """Return the scale for a GPU."""
    sizes = ("12x768", "24x1024")
    return Scale(device, torch.bfloat16, 32_768, 12, 64, sizes, (512, 1536), 7, 0.1)


def tiny(device: torch.device) -> Scale:
    """Return the scale for a test."""
    return Scale(device, torch.bfloat16, 96, 2, 16, ("tiny",), (32, 48), 1, 0.0)


def values(scale: Scale) -> Iterator[Figure]:
    """Compare the rotary kernel, forward and backward, with fp64."""
    bounds = {torch.float32: (2e-6, "absolute"), torch.float16: (1.0, "ulp")}
    bounds[torch.bfloat16] = 1.0, "ulp"
    positions, size = positions_of(min(scale.tokens, 1000)), scale.head_size
    shape = (len(positions), 3, scale.heads, size)
    turns = turns_of(size).to(scale.device)
    rows = positions.to(scale.device)
    for dtype, (bound, unit) in bounds.items():
        x = pack(shape, dtype)
        buffer = x.clone().to(scale.device)
        rotate_(buffer, rows, turns)
        forward = error(buffer.cpu(), exact_packed(x, positions, size))
        gathered = rotate_gather(*x.to(scale.device).unbind(1), rows, turns, False)
        backward = error(gathered.cpu(), exact_packed(x, -positions, size))
        result = f"{forward:.1e} forward, {backward:.1e} backward ({unit})"
        name = str(dtype).removeprefix("torch.")
        yield Figure("rotary against fp64", name, result, f"<= {bound:g}")


def attention_values(scale: Scale) -> Iterator[Figure]:
    """Compare attention over documents, and its gradients, with fp64 one by one."""
    lengths = tuple(draw_lengths("short", 8, longest=scale.lengths[0]))
    shape = (3, sum(lengths), scale.heads, scale.head_size)
    low = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(scale.dtype)
    found = []
    for x, form in ((low.to(scale.device), attend), (low.double(), by_document)):
        x.requires_grad_()
        out = form(*x.unbind(0), Pack(lengths, x.device), causal=False)
        (gradient,) = torch.autograd.grad(out.square().sum(), x)
        found.append((out.detach().double().cpu(), gradient.double().cpu()))
    errors = [
        float((ours - theirs).abs().max() / theirs.abs().max())
        for ours, theirs in zip(*found, strict=True)
    ]
    result = f"{errors[0]:.1e} forward, {errors[1]:.1e} backward (of the largest)"
    yield Figure("attention against fp64", f"{len(lengths)} documents", result, "<= 0.02")


def by_document(q: Tensor, k: Tensor, v: Tensor, documents: Pack, *, causal: bool) -> Tensor:
    """Attend within each document by the formula."""
    parts = zip(*(x.split(documents.lengths) for x in (q, k, v)), strict=True)
    out = []
    for part in parts:
        query, key, value = (x.transpose(0, 1) for x in part)
        scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
        out.append((scores.softmax(-1) @ value).transpose(0, 1))
    return torch.cat(out)


def rotary_bandwidth(scale: Scale) -> Iterator[Figure]:
    """Measure the rotary kernels' bytes a second, as shares of a copy's."""
    tokens, heads, size = scale.tokens, scale.heads, scale.head_size
    positions = torch.arange(tokens, device=scale.device) % scale.lengths[0]
    rows, turns = positions.int(), turns_of(size).to(scale.device)
    qkv = torch.randn(tokens, 3, heads, size, device=scale.device).to(scale.dtype)
    parts = [x.contiguous() for x in qkv.unbind(1)]
    source, target = qkv.clone(), qkv.clone()
    unit = tokens * heads * size * qkv.element_size()  # q, k or v once
    works: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (lambda: target.copy_(source), 6 * unit),
        "ours, forward in place": (lambda: rotate_(qkv, rows, turns), 4 * unit),
        "ours, backward gathered": (lambda: rotate_gather(*parts, rows, turns, False), 6 * unit),
    }
    works |= other_kernels(scale, qkv, turns, unit)
    times = taken_in_turns(scale, {name: work for name, (work, _) in works.items()})
    rates = {name: [size / t for t in wall(times[name])] for name, (_, size) in works.items()}
    for name in list(works)[1:]:
        share = ratio(rates[name], rates["copy"])
        result = f"{share.digits(2)} of a copy's {max(rates['copy']) / 1e12:.2f} TB/s"
        yield Figure("rotary bandwidth", name, result, "0.90" if "ours" in name else "")


def other_kernels(
    scale: Scale, qkv: Tensor, turns: Tensor, unit: int
) -> dict[str, tuple[Callable[[], object], int]]:
    """Return flash-attn's and Liger's rotations of q and k, where they are installed."""
    found: dict[str, tuple[Callable[[], object], int]] = {}
    length = scale.lengths[0]
    count = len(qkv) // length
    cos, sin = (x.to(qkv.dtype) for x in turns[:length].unbind(-1))
    by_row = qkv[: count * length].unflatten(0, (count, length))  # [B, L, 3, H, D]
    if qkv.is_cuda and importlib.util.find_spec("flash_attn"):
        from flash_attn.layers.rotary import apply_rotary_emb_qkv_

        found["flash-attn, q and k in place"] = (
            lambda: apply_rotary_emb_qkv_(by_row, cos, sin, interleaved=True),
            4 * unit,
        )
    if qkv.is_cuda and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers.rope import liger_rotary_pos_emb

        q, k = (by_row[:, :, i].contiguous().transpose(1, 2) for i in (0, 1))
        twice = [torch.cat([x, x], dim=-1)[None] for x in (cos, sin)]
        found["Liger, halves, q and k apart"] = (
            lambda: liger_rotary_pos_emb(q, k, *twice),
            4 * unit,
        )
    return found


def attention_speed(scale: Scale) -> Iterator[Figure]:
    """Compare packed attention with torch's on the same documents, padded to the longest."""
    for corpus in ("short", "articles"):
        longest = scale.lengths[0]
        count = max(4, 4 * scale.tokens // longest)
        lengths = tuple(draw_lengths(corpus, count, longest=longest))
        documents = Pack(lengths, scale.device)
        heads, size = scale.heads, scale.head_size
        packed = torch.randn(3, sum(lengths), heads, size, device=scale.device).to(scale.dtype)
        padded = torch.randn(3, count, heads, max(lengths), size, device=scale.device)
        padded = padded.to(scale.dtype).requires_grad_()
        ends = torch.tensor(lengths, device=scale.device)[:, None]
        mask = (torch.arange(max(lengths), device=scale.device) < ends)[:, None, None]
        packed.requires_grad_()

        def ours(x: Tensor = packed, documents: Pack = documents) -> None:
            attend(*x.unbind(0), documents, causal=False).sum().backward()
            x.grad = None

        def theirs(x: Tensor = padded, mask: Tensor = mask) -> None:
            F.scaled_dot_product_attention(*x.unbind(0), attn_mask=mask).sum().backward()
            x.grad = None

        times = taken_in_turns(scale, {"ours": ours, "theirs": theirs})
        times_as_fast = ratio(wall(times["theirs"]), wall(times["ours"]))
        yield Figure("attention, packed over padded", corpus, f"{times_as_fast} x as fast")


def taken_in_turns(scale: Scale, works: dict[str, Callable[[], object]]) -> dict[str, list[Time]]:
    """Let pieces of work take turns, each as often as fills a turn."""
    repeats = {name: repeats_for(work, scale.seconds) for name, work in works.items()}
    sides = {
        name: (lambda turn, name=name, work=work: timed(work, repeats[name]))
        for name, work in works.items()
    }
    return alternate(sides, scale.turns)


def training(scale: Scale) -> Iterator[Figure]:
    """Measure training steps of each size and length, beside Hugging Face's."""
    for size in scale.sizes:
        for length in scale.lengths:
            yield from training_of(scale, size, length)
            if scale.device.type == "cuda":
                torch.cuda.empty_cache()


def training_of(scale: Scale, size: str, length: int) -> Iterator[Figure]:
    """Measure one size and length."""
    config, vocab_size = model_config(size, max_positions=max(scale.lengths)), vocabulary(size)
    count = max(1, scale.tokens // length)
    batch = collate([example(length, number=n, vocab_size=vocab_size) for n in range(count)])
    batch = batch.to(scale.device)
    model = LanguageModel(config, vocab_size=vocab_size)
    initialize(model, 0)
    model = model.to(scale.device, scale.dtype).train()
    sides = {"ours": stepper(model, lambda: our_loss(model, batch))}
    if importlib.util.find_spec("transformers"):
        their = their_model("roformer", config, vocab_size)
        their = their.to(scale.device, scale.dtype).train()
        rows, labels = padded(batch, count, length)
        sides["theirs"] = stepper(their, lambda: their(input_ids=rows, labels=labels).loss)
    a, b = (
        torch.randn(n, n, device=scale.device).to(scale.dtype) for n in [product_size(scale)] * 2
    )
    sides["product"] = lambda: a @ b
    times = taken_in_turns(scale, sides)
    flops = training_flops(config, vocab_size, batch.lengths, batch.num_targets)
    rates = [flops / t for t in wall(times["ours"])]
    peaks = [2 * len(a) ** 3 / t for t in wall(times["product"])]
    speed = batch.num_tokens / min(wall(times["ours"]))
    case = f"{size}, {count} x {length}"
    yield Figure("training", case, f"{speed:,.0f} tokens/s")
    yield Figure("MFU, of the measured peak", case, ratio(rates, peaks).digits(2))
    if sheet := data_sheet_flops(scale.device):
        yield Figure("MFU, of the data sheet", case, f"{max(rates) / sheet:.2f}", "0.50")
    if "theirs" in times:
        times_as_fast = ratio(wall(times["theirs"]), wall(times["ours"]))
        yield Figure("training against Hugging Face", case, f"{times_as_fast} x as fast")


def stepper(model: torch.nn.Module, loss_of: Callable[[], Tensor]) -> Callable[[], object]:
    """Return a training step."""
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        loss_of().backward()
        adamw.step()
        adamw.zero_grad()

    return step


def our_loss(model: LanguageModel, batch: Batch) -> Tensor:
    """Return the mean loss of a batch."""
    loss = model(batch.input_ids, batch.positions, batch.lengths, batch.target_index, batch.targets)
    total: Tensor = loss.total / batch.num_targets
    return total


def padded(batch: Batch, count: int, length: int) -> tuple[Tensor, Tensor]:
    """Return input ids and labels [count, length] of full rows."""
    labels = torch.full_like(batch.input_ids, -100)
    labels[batch.target_index] = batch.targets
    return batch.input_ids.view(count, length), labels.view(count, length)


def product_size(scale: Scale) -> int:
    """Return the side of the square matrices that give the peak."""
    return 8192 if scale.device.type == "cuda" else 64


def data_sheet_flops(device: torch.device) -> float | None:
    """Return the dense bf16 peak that the maker states, if it is known here."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for part, flops in DATA_SHEET.items() if part in name), None)


SECTIONS = (values, attention_values, rotary_bandwidth, attention_speed, training)


def main(arguments_given: list[str] | None = None) -> int:
    """Print each figure as soon as it is there; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="run everything, and measure nothing")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(arguments_given)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("tests.benchmarks.gpu: this machine has no CUDA device", file=sys.stderr)
        return 2
    device = torch.device(arguments.device)
    scale = tiny(device) if arguments.tiny else full(device)
    figures: list[Figure] = []
    print_table(Figure._fields, [])
    failed = False
    for section in SECTIONS:
        try:
            for figure in section(scale):
                figures.append(figure)
                print_rows([figure])
        except Exception as error:  # one figure that cannot be had must not cost the others
            failed = True
            figures.append(Figure(section.__name__, "", f"failed: {type(error).__name__}: {error}"))
            print_rows(figures[-1:])
    write_json(arguments.json, [figure._asdict() for figure in figures])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
