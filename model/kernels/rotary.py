"""Rotary position embedding (section 3.2.2 of the paper, eq. 14-16 and 34) of packed projections.

`rotate_qk` is the one function; the device of its data chooses the form:
- CUDA: one Triton kernel, in `model.kernels.rotary_triton`
- CPU, and wherever there is no Triton: complex products of torch, the fastest form that needs no
  compiler; in place they cost as much as copying q and k
- under torch.compile: the operator `roformer::rotate_split`, which a graph keeps as it is
`rotate` is the plain formula for one tensor, for what turns something else than the projections.

A pair is read as one complex number, so eq. 34 is a multiplication by e^(i m theta), and its
gradient the one by the conjugate. The paper's pairs are neighbours, (0, 1), (2, 3), ...; `halves`
pairs (i, i + R) instead, as foreign weights may want. Features from 2R on are not turned. The maths
is fp32 or wider whatever the data, rounded once, and without atomics: it repeats bit for bit.

Bytes moved for each token and layer, in U = H x D x bytes of an element (BERT's base in bf16:
1,536). Tables stay in L2 on a GPU; 4 bytes of position a token come on top.

| | reads | writes | sum | floor |
|---|---|---|---|---|
| forward, in place (eager) | q, k | q, k | 4U | 4U |
| forward, split (torch.compile) | q, k, v | q, k, v | 6U | 4U |
| backward, gathered | dq, dk, dv | dqkv | 6U | 4U, with gradients packed already |
| backward, in place on packed gradients | dq, dk | dq, dk | 4U | 4U |

The gathered backward also does what autograd would need another 6U for: stacking dq, dk and dv.
The formula piece by piece moves 20U forward, 40U where bf16 is promoted by the tables.

Shapes: T tokens, H heads, D features of a head, R <= D/2 turned pairs, P positions of a table.
"""

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def rotate(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, *, halves: bool = False) -> Tensor:
    """Turn the first R feature pairs of every head by the angles of its token: the plain formula.

    cos and sin are fp32. The result is new and has the type of x.
    """
    cos, sin = cos_TR.unsqueeze(-2), sin_TR.unsqueeze(-2)
    size = 2 * cos.shape[-1]
    wide = x_THD[..., :size].to(torch.promote_types(x_THD.dtype, cos.dtype))
    if halves:
        a, b = wide.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        pairs_THR = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs_THR * torch.complex(cos, sin)).flatten(-2)
    turned = turned.to(x_THD.dtype)
    return turned if size == x_THD.shape[-1] else torch.cat([turned, x_THD[..., size:]], dim=-1)


def rotate_qk(
    qkv_T3HD: Tensor, positions_T: Tensor | None, turns_PR2: Tensor, *, halves: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v [T, H, D] of a packed projection, q and k turned by their positions.

    Args:
        qkv_T3HD: The projection's output, contiguous. It is given away: outside of torch.compile q
            and k are turned where they stand, and the results are views of it.
        positions_T: The table's row of every token, as integers below P (a GPU does not check);
            None if row t of the table is token t's.
        turns_PR2: cos and sin of every position's angles, fp32 [P, R, 2].
        halves: Pair feature i with i + R rather than 2i with 2i + 1.

    Gradients flow to qkv alone. ValueError for shapes that do not fit, and for a parameter, since
    it would be overwritten.
    """
    _check(qkv_T3HD, positions_T, turns_PR2)
    if torch.compiler.is_compiling():
        return rotate_split(qkv_T3HD, positions_T, turns_PR2, halves)
    if qkv_T3HD.is_leaf and qkv_T3HD.requires_grad:
        raise ValueError("rotate_qk writes over its input, which must not be a parameter")
    return _InPlace.apply(qkv_T3HD, positions_T, turns_PR2, halves)


def rotate_(
    qkv_T3HD: Tensor,
    positions_T: Tensor | None,
    turns_PR2: Tensor,
    *,
    halves: bool = False,
    backward: bool = False,
) -> None:
    """Turn q and k where they stand, or with `backward` their packed gradients; no autograd."""
    _check(qkv_T3HD, positions_T, turns_PR2)
    qk = qkv_T3HD.detach()[:, :2]
    if triton := _triton(qk.device.type):
        q, k = qk.unbind(1)
        triton.turn((q, k), (q, k), positions_T, turns_PR2, halves=halves, backward=backward)
    else:
        _turn(qk, qk, _rows(positions_T, turns_PR2), halves=halves, backward=backward)


@torch.library.custom_op("roformer::rotate_gather", mutates_args=())
def rotate_gather(
    dq_THD: Tensor,
    dk_THD: Tensor,
    dv_THD: Tensor,
    positions_T: Tensor | None,
    turns_PR2: Tensor,
    halves: bool,
) -> Tensor:
    """Return the gradient of the packed projection [T, 3, H, D] from those of q, k and v."""
    num_tokens, *rest = dq_THD.shape
    dqkv_T3HD = dq_THD.new_empty(num_tokens, 3, *rest)
    _turn_qkv(
        (dq_THD, dk_THD, dv_THD),
        dqkv_T3HD.unbind(1),
        positions_T,
        turns_PR2,
        halves=halves,
        backward=True,
    )
    return dqkv_T3HD


@torch.library.custom_op("roformer::rotate_split", mutates_args=())
def rotate_split(
    qkv_T3HD: Tensor, positions_T: Tensor | None, turns_PR2: Tensor, halves: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return turned q and k, and v, as new tensors: without side effects, for graphs."""
    q, k, v = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in qkv_T3HD.unbind(1)
    )
    _turn_qkv(qkv_T3HD.unbind(1), (q, k, v), positions_T, turns_PR2, halves=halves, backward=False)
    return q, k, v


@rotate_gather.register_fake
def _(
    dq: Tensor, dk: Tensor, dv: Tensor, positions: Tensor | None, turns: Tensor, halves: bool
) -> Tensor:
    num_tokens, *rest = dq.shape
    return dq.new_empty(num_tokens, 3, *rest)


@rotate_split.register_fake
def _(
    qkv: Tensor, positions: Tensor | None, turns: Tensor, halves: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in qkv.unbind(1))
    return q, k, v


def _save(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    _, positions_T, turns_PR2, ctx.halves = inputs
    ctx.save_for_backward(positions_T, turns_PR2)


def _backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None, None, None]:
    return rotate_gather(dq, dk, dv, *ctx.saved_tensors, ctx.halves), None, None, None


rotate_split.register_autograd(_backward, setup_context=_save)


class _InPlace(torch.autograd.Function):
    """The same in the projection's own memory.

    autograd is not told of the write (`mark_dirty` would copy gradients of views), and need not be:
    a linear layer keeps its inputs, not its output. Whatever did keep the output is told by torch
    that it has changed, since the detached tensor counts its versions too.
    """

    @staticmethod
    def forward(
        qkv_T3HD: Tensor, positions_T: Tensor | None, turns_PR2: Tensor, halves: bool
    ) -> tuple[Tensor, ...]:
        buffer_T3HD = qkv_T3HD.detach()
        rotate_(buffer_T3HD, positions_T, turns_PR2, halves=halves)
        return buffer_T3HD.unbind(1)

    setup_context = staticmethod(_save)
    backward = staticmethod(_backward)


def _check(qkv_T3HD: Tensor, positions_T: Tensor | None, turns_PR2: Tensor) -> None:
    shape, (rows, pairs, parts) = tuple(qkv_T3HD.shape), turns_PR2.shape
    if len(shape) != 4 or shape[1] != 3 or shape[3] % 2 or not qkv_T3HD.is_contiguous():
        raise ValueError(f"qkv must be contiguous [T, 3, H, D] with an even D, got {shape}")
    if parts != 2 or not 0 < 2 * pairs <= shape[3]:
        raise ValueError(f"turns of {pairs} pairs x {parts} do not fit heads of {shape[3]}")
    tokens = rows if positions_T is None else len(positions_T)
    if tokens != shape[0]:
        raise ValueError(f"{shape[0]} tokens, but positions of {tokens}")


def _rows(positions_T: Tensor | None, turns_PR2: Tensor) -> Tensor:
    return turns_PR2 if positions_T is None else turns_PR2[positions_T]


def _turn_qkv(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    positions_T: Tensor | None,
    turns_PR2: Tensor,
    *,
    halves: bool,
    backward: bool,
) -> None:
    """Write turned q and k, and v as it is, into targets [T, H, D] of one layout."""
    if triton := _triton(targets[0].device.type):
        triton.turn(sources, targets, positions_T, turns_PR2, halves=halves, backward=backward)
        return
    rows = _rows(positions_T, turns_PR2)
    for source, target in zip(sources[:2], targets[:2], strict=True):
        _turn(source[:, None], target[:, None], rows, halves=halves, backward=backward)
    targets[2].copy_(sources[2])


def _turn(
    source_TNHD: Tensor, target_TNHD: Tensor, turns_TR2: Tensor, *, halves: bool, backward: bool
) -> None:
    """Write source with its pairs turned: eq. 34, or its inverse on the way back.

    The target may be the source itself.
    """
    size = 2 * turns_TR2.shape[1]
    source, target = source_TNHD[..., :size], target_TNHD[..., :size]
    wide = source.to(torch.promote_types(source.dtype, turns_TR2.dtype))  # itself if it is wide
    if halves:
        cos, sin = turns_TR2[:, None, None].unbind(-1)
        a, b = wide.chunk(2, dim=-1)
        step = -1.0 if backward else 1.0
        turned = (a * cos).addcmul_(b, sin, value=-step), (b * cos).addcmul_(a, sin, value=step)
        for half, part in zip(target.chunk(2, dim=-1), turned, strict=True):
            half.copy_(part)
    else:
        turns = torch.view_as_complex(turns_TR2)[:, None, None]
        if backward:  # conj() only sets a flag, which is lost inside of an operator in a graph
            turns = turns.conj_physical()
        if wide.dtype == target.dtype:
            torch.mul(_pairs(wide), turns, out=torch.view_as_complex(target.unflatten(-1, (-1, 2))))
        else:
            target.copy_(torch.view_as_real(_pairs(wide).mul_(turns)).flatten(-2))
    if target_TNHD is not source_TNHD and size < source_TNHD.shape[-1]:
        target_TNHD[..., size:].copy_(source_TNHD[..., size:])


def _pairs(x: Tensor) -> Tensor:
    """Return neighbours as complex numbers: a view, or a copy where that cannot be."""
    x = x.unflatten(-1, (-1, 2))
    if x.stride(-1) != 1 or any(stride % 2 for stride in (*x.stride()[:-1], x.storage_offset())):
        x = x.contiguous()  # gradients may come expanded, or cut at odd places
    return torch.view_as_complex(x)


@cache
def _triton(device: str) -> ModuleType | None:
    """Return the module of the GPU's kernel where it can serve."""
    if device != "cuda":
        return None
    try:
        from model.kernels import rotary_triton
    except ImportError:  # torch's wheels for CUDA bring Triton on Linux only
        return None
    return rotary_triton
