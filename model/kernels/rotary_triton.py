"""The rotation on a GPU: one Triton kernel that reads every byte once and writes it once.

A program turns the same heads of q and k for a few tokens, so that it looks up their angles once.
Positions come one a token, so documents of any lengths need no grid of their own. Tiles are such
that all of q, k and v moves in accesses of 128 bits, without padded heads and without spills;
`tests/model/kernels` reads that from the machine code for sm_80, sm_90 and sm_100.

Triton's interpreter cuts bf16 where a GPU rounds (3.6 to 3.9), so there the last bit may differ.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 4


@triton.jit
def _table(turns, rows, live, first, R: tl.constexpr, BR: tl.constexpr, ACC: tl.constexpr):
    """Load cos and sin of BR pairs of every token: [BT, 1, BR] each."""
    column = 2 * first + tl.arange(0, 2 * BR)
    mask = live[:, None, None]
    if R % BR != 0:
        mask = mask & (column < 2 * R)[None, None, :]
    both = tl.load(
        turns + rows[:, None, None] * (2 * R) + column[None, None, :], mask=mask, other=0
    )
    cos, sin = tl.split(tl.reshape(both, (rows.shape[0], 1, BR, 2)))
    return cos.to(ACC), sin.to(ACC)


@triton.jit
def _turn_pairs(
    source, target, live, cos, sin, first,
    R: tl.constexpr, BR: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Turn BR pairs; source and target point at feature 0 of each [BT, BH, 1]."""
    BT: tl.constexpr = source.shape[0]
    BH: tl.constexpr = source.shape[1]
    mask = live[:, None, None]
    if HALVES:
        column = first + tl.arange(0, BR)
        if R % BR != 0:
            mask = mask & (column < R)[None, None, :]
        column = column[None, None, :]
        a = tl.load(source + column, mask=mask, other=0).to(cos.dtype)
        b = tl.load(source + column + R, mask=mask, other=0).to(cos.dtype)
        tl.store(target + column, (a * cos - b * sin).to(target.dtype.element_ty), mask=mask)
        tl.store(target + column + R, (b * cos + a * sin).to(target.dtype.element_ty), mask=mask)
    else:
        column = 2 * first + tl.arange(0, 2 * BR)
        if R % BR != 0:
            mask = mask & (column < 2 * R)[None, None, :]
        column = column[None, None, :]
        pairs = tl.load(source + column, mask=mask, other=0).to(cos.dtype)
        a, b = tl.split(tl.reshape(pairs, (BT, BH, BR, 2)))
        turned = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (BT, BH, 2 * BR))
        tl.store(target + column, turned.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _copy(source, target, live, FIRST: tl.constexpr, D: tl.constexpr, B: tl.constexpr):
    """Copy the features FIRST to D."""
    for first in tl.static_range(FIRST, D, B):
        column = first + tl.arange(0, B)
        mask = live[:, None, None]
        if (D - FIRST) % B != 0:
            mask = mask & (column < D)[None, None, :]
        column = column[None, None, :]
        tl.store(target + column, tl.load(source + column, mask=mask, other=0), mask=mask)


@triton.jit
def turn_kernel(
    q, k, v, q_out, k_out, v_out, positions, turns, num_tokens,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, BREST: tl.constexpr,
    HALVES: tl.constexpr, BACKWARD: tl.constexpr, COPY: tl.constexpr, ROWS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Turn BT tokens x BH heads of q and k, chunks of BR pairs; with COPY write all else as well.

    Strides are in elements, those of features 1. BH divides H.
    """
    program = tl.program_id(0)
    token = (program // (H // BH)) * BT + tl.arange(0, BT)
    head = (program % (H // BH)) * BH + tl.arange(0, BH)
    live = token < num_tokens
    if ROWS:
        rows = tl.load(positions + token, mask=live, other=0)
    else:
        rows = token
    token = token.to(tl.int64)[:, None, None]  # T x 3 x H x D may pass 2^31
    head = head[None, :, None]
    q += token * q_token + head * q_head
    k += token * k_token + head * k_head
    q_out += token * out_token + head * out_head
    k_out += token * out_token + head * out_head
    for first in tl.static_range(0, R, BR):
        cos, sin = _table(turns, rows, live, first, R, BR, ACC)
        if BACKWARD:
            sin = -sin
        _turn_pairs(q, q_out, live, cos, sin, first, R, BR, HALVES)
        _turn_pairs(k, k_out, live, cos, sin, first, R, BR, HALVES)
    if COPY:
        if 2 * R < D:
            _copy(q, q_out, live, 2 * R, D, BREST)
            _copy(k, k_out, live, 2 * R, D, BREST)
        v += token * v_token + head * v_head
        v_out += token * out_token + head * out_head
        _copy(v, v_out, live, 0, D, BD)


def turn(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    positions_T: Tensor | None,
    turns_PR2: Tensor,
    *,
    halves: bool,
    backward: bool,
) -> None:
    """Write turned q and k, and v as it is, into targets of equal strides [T, H, D].

    With q and k alone, targets are the sources themselves, and features that no pair has are left.
    """
    num_tokens, heads, size = targets[0].shape
    if num_tokens == 0:
        return
    # Gradients may come expanded or transposed; the kernel wants each head's features in a row.
    sources = [x if x.stride(2) == 1 else x.contiguous() for x in sources]
    q, k, v = (*sources, *sources)[:3] if len(sources) == 3 else (*sources, sources[1])
    q_out, k_out, v_out = targets if len(targets) == 3 else (*targets, targets[1])
    pairs = turns_PR2.shape[1]
    constants = tiles(num_tokens, heads, size, pairs, halves)
    programs = triton.cdiv(num_tokens, constants["BT"]) * (heads // constants["BH"])
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        turn_kernel[(programs,)](
            q, k, v, q_out, k_out, v_out,
            turns_PR2 if positions_T is None else positions_T,
            turns_PR2.contiguous(),
            num_tokens,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *q_out.stride()[:2],
            **constants,
            H=heads, D=size, R=pairs,
            HALVES=halves, BACKWARD=backward, COPY=len(sources) == 3, ROWS=positions_T is not None,
            ACC=tl.float64 if torch.float64 in (q.dtype, turns_PR2.dtype) else tl.float32,
            num_warps=WARPS,
        )  # fmt: skip


def tiles(num_tokens: int, heads: int, size: int, pairs: int, halves: bool) -> dict[str, int]:
    """Return how the work is cut: 2,048 features of q, and as many of k, a program.

    Heads are cut by a power of two that divides their number, features by one that divides theirs
    while pieces stay whole 128-bit accesses; 96 features are three pieces of 32.
    """
    run = _block(pairs if halves else 2 * pairs)
    per_head = 2 * run if halves else run
    heads_tile = next(n for n in (4, 2, 1) if heads % n == 0)
    return {
        "BT": max(2048 // (heads_tile * max(per_head, 1)), 1),
        "BH": heads_tile,
        "BR": run if halves else run // 2,
        "BD": _block(size),
        "BREST": _block(size - 2 * pairs) if size > 2 * pairs else 1,
    }


def _block(size: int) -> int:
    """Return the largest power of two in size, or where that is small, the next one over it."""
    even = size & -size
    return even if even >= 16 else triton.next_power_of_2(size)
