"""The GPU's kernel under Triton's interpreter, on a CPU: prints every case's errors as JSON.

A program of its own, since triton.jit decides between interpreter and compiler when it is applied.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from model.kernels import rotary, rotary_triton
from tests.model.kernels.cases import (
    DTYPES,
    error,
    exact_packed,
    pack,
    positions_of,
    turns_of,
)

SHAPES = [(t, h, d) for t in (1, 257, 1000) for h in (1, 12, 16) for d in (32, 64, 96, 128)]


def types_of(shape: tuple[int, int, int], number: int) -> tuple[str, ...]:
    """Return fp32 and one narrow type, for the largest shapes one type: the interpreter is slow."""
    place = number + number // 4
    if shape[0] == 1000:
        return (tuple(DTYPES)[place % 3],)
    return "fp32", ("fp16", "bf16")[place % 2]


real_tiles = rotary_triton.tiles


def large_tiles(num_tokens: int, heads: int, *rest: int) -> dict[str, int]:
    """Cut into few programs, each of which costs the interpreter milliseconds."""
    tokens = 1 << min(num_tokens - 1, 511).bit_length()
    return real_tiles(num_tokens, heads, *rest) | {"BT": tokens, "BH": heads & -heads}


def run(
    qkv: Tensor, gradient: Tensor, positions: Tensor, turns: Tensor, halves: bool
) -> tuple[Tensor, Tensor]:
    """Return q, k and v, packed, and the gradient of qkv."""
    qkv.requires_grad_()
    out = rotary.rotate_qk(qkv * 1, positions.int(), turns, halves=halves)
    (back,) = torch.autograd.grad(out, qkv, gradient.unbind(1))
    return torch.stack(out, dim=1), back


def errors(
    shape: tuple[int, int, int], dtype: str, size: int | None = None, halves: bool = False
) -> list[float]:
    """Return the errors of values and gradients, turned features `size` of D."""
    num_tokens, heads, width = shape
    size = size or width
    positions = positions_of(num_tokens)
    qkv, gradient = (pack((num_tokens, 3, heads, width), DTYPES[dtype], seed) for seed in (0, 1))
    out, back = run(qkv, gradient, positions, turns_of(size), halves)
    return [
        error(out, exact_packed(qkv, positions, size, halves=halves)),
        error(back, exact_packed(gradient, -positions, size, halves=halves)),
    ]


def mistakes() -> dict[str, list[float]]:
    """Return errors of wrong results in fp32: the wrong sign, the wrong pairs, rounded tables."""
    positions, turns = positions_of(40), turns_of(64)
    qkv, gradient = (pack((40, 3, 4, 64), torch.float32, seed) for seed in (0, 1))
    wrong = {
        "sign": (turns * torch.tensor([1.0, -1.0]), False),
        "halves": (turns, True),
        "bf16 tables": (turns.bfloat16().float(), False),
        "next position": (turns.roll(-1, 0), False),
        "none": (turns, False),
    }
    result = {}
    for name, (table, halves) in wrong.items():
        out, back = run(qkv, gradient, positions, table, halves)
        result[name] = [
            error(out, exact_packed(qkv, positions, 64)),
            error(back, exact_packed(gradient, -positions, 64)),
        ]
    return result


def gradcheck(halves: bool, size: int) -> bool:
    qkv = pack((2, 3, 1, 6), torch.float64).requires_grad_()
    turns, positions = turns_of(size, torch.float64), torch.tensor([5, 0])
    return torch.autograd.gradcheck(
        lambda x: rotary.rotate_qk(x * 1, positions, turns, halves=halves), (qkv,)
    )


def forms_agree(dtype: str, halves: bool, size: int) -> dict[str, bool]:
    """Return whether split, in place and without row numbers give the same bits, and untouched v.

    The gradients of q, k and v come as transposed and expanded views.
    """
    positions, turns = positions_of(19).int(), turns_of(size)
    qkv = pack((19, 3, 4, 64), DTYPES[dtype])
    placed, plain = qkv.clone(), qkv.clone()
    rotary.rotate_(placed, positions, turns, halves=halves)
    rotary.rotate_(plain, None, turns[positions], halves=halves)
    split = torch.stack(rotary.rotate_split(qkv, positions, turns, halves), dim=1)
    packed = qkv.clone()
    rotary.rotate_(packed, positions, turns, halves=halves, backward=True)
    how = (positions, turns, halves)
    views = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in qkv.unbind(1)]
    ones = torch.ones((), dtype=qkv.dtype).expand(19, 4, 64)
    return {
        "in place": torch.equal(placed, split),
        "rows": torch.equal(plain, split),
        "v": torch.equal(placed[:, 2], qkv[:, 2]),
        "rest": torch.equal(placed[..., size:], qkv[..., size:]),
        "gathered": torch.equal(rotary.rotate_gather(*qkv.unbind(1), *how), packed),
        "transposed": torch.equal(rotary.rotate_gather(*views, *how), packed),
        "expanded": torch.equal(
            rotary.rotate_gather(ones, ones, ones, *how),
            rotary.rotate_gather(*[ones.contiguous()] * 3, *how),
        ),
        "moves": not torch.equal(placed[1:, :2], qkv[1:, :2]),
    }


def main() -> None:
    """Print the errors as one JSON object."""
    rotary._triton = lambda device: rotary_triton
    rotary_triton.tiles = large_tiles
    result = {
        "matrix": [
            [*shape, dtype, *errors(shape, dtype)]
            for n, shape in enumerate(SHAPES)
            for dtype in types_of(shape, n)
        ],
        "halves": [
            [257, 12, d, dtype, *errors((257, 12, d), dtype, halves=True)]
            for d in (32, 64, 96, 128)
            for dtype in DTYPES
        ],
        "partial": [
            [33, 12, d, size, halves, *errors((33, 12, d), "fp32", size, halves)]
            for d, size in ((64, 32), (64, 2), (64, 24), (96, 64), (10, 6), (128, 96), (2, 2))
            for halves in (False, True)
        ],
        "mistakes": mistakes(),
        "gradcheck": [gradcheck(False, 6), gradcheck(True, 4)],
    }
    rotary_triton.tiles = real_tiles
    result["real tiles"] = [
        [*shape, dtype, *errors(shape, dtype, halves=halves)]
        for shape in ((1, 1, 64), (35, 12, 64), (19, 3, 96), (9, 16, 128), (70, 2, 32))
        for dtype, halves in (("fp32", True), ("fp16", False), ("bf16", False))
    ]
    result["forms"] = [
        [dtype, halves, size, forms_agree(dtype, halves, size)]
        for dtype, halves, size in (
            ("fp32", False, 64),
            ("fp32", True, 20),
            ("bf16", False, 20),
            ("fp16", True, 64),
        )
    ]
    empty = run(pack((0, 3, 4, 8), torch.float32), pack((0, 3, 4, 8), torch.float32),
                positions_of(0), turns_of(8), False)  # fmt: skip
    result["empty"] = [list(x.shape) for x in empty]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
