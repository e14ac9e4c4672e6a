"""Which form of attention runs where, and what each kernel is handed.

Values and gradients of the form by pieces are compared in tests/model/test_attention.py. The flash
kernels need a GPU: here their calls are run by a dense stand-in that reads the same arguments, and
torch's is traced with fake tensors, which knows its signature.
"""

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen

from model import pack as pack_module
from model.kernels import attention
from model.kernels.attention import (
    attend,
    by_pieces,
    by_products,
    flash_attn,
    kernel_for,
    torch_varlen,
)
from model.pack import Pack
from tests.model.helpers import difference
from tests.model.test_attention import dense, random_qkv

HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("device", "dtype", "head_size", "dropout", "package", "expected"),
    [
        ("cuda", HALF, 64, 0.0, False, torch_varlen),
        ("cuda", torch.float16, 128, 0.0, False, torch_varlen),
        ("cuda", HALF, 64, 0.0, True, flash_attn),
        ("cuda", HALF, 64, 0.1, True, flash_attn),
        ("cuda", HALF, 64, 0.1, False, by_pieces),  # torch's kernel has no dropout
        ("cuda", FULL, 64, 0.0, True, by_pieces),
        ("cuda", HALF, 12, 0.0, True, by_pieces),
        ("cuda", HALF, 264, 0.0, True, by_pieces),
        ("cpu", HALF, 64, 0.0, True, by_pieces),
        ("cpu", FULL, 64, 0.1, True, by_pieces),
    ],
)
def test_the_form_follows_device_type_and_dropout(
    device: str,
    dtype: torch.dtype,
    head_size: int,
    dropout: float,
    package: bool,
    expected: attention.Kernel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "has_flash_attn", lambda: package)
    monkeypatch.setattr(attention, "has_torch_varlen", lambda: True)
    assert kernel_for(device, dtype, head_size, dropout) is expected
    if expected is torch_varlen:
        monkeypatch.setattr(attention, "has_torch_varlen", lambda: False)  # before A100
        assert kernel_for(device, dtype, head_size, dropout) is by_pieces


def reading(seen: list[float], *, causal_by_window: bool):  # type: ignore[no-untyped-def]
    """Return a dense stand-in for a variable-length kernel."""

    def kernel(q, k, v, cu_q, cu_k, max_q, max_k, *, dropout_p=0.0, **how):  # type: ignore[no-untyped-def]
        assert cu_q.dtype == torch.int32
        assert torch.equal(cu_q, cu_k)
        assert max_q == max_k == int(cu_q.diff().max())
        seen.append(dropout_p)
        causal = how["window_size"] == (-1, 0) if causal_by_window else how["causal"]
        return dense(q, k, v, tuple(cu_q.diff().tolist()), causal=causal)

    return kernel


@pytest.mark.parametrize("causal", [False, True])
def test_flash_kernels_are_handed_the_pack(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (5, 1, 9, 9, 70)
    q, k, v = random_qkv(sum(lengths))
    expected = by_pieces(q, k, v, Pack(lengths), causal, 0.0)
    seen: list[float] = []
    monkeypatch.setattr(varlen, "varlen_attn", reading(seen, causal_by_window=True))
    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func = reading(seen, causal_by_window=False)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    for kernel, dropout in ((torch_varlen, 0.0), (flash_attn, 0.25)):
        monkeypatch.setattr(attention, "kernel_for", lambda *_, kernel=kernel: kernel)
        out = attend(q, k, v, Pack(lengths), causal=causal, dropout=dropout)
        assert difference(out, expected) < 1e-13
        assert difference(out, by_pieces(q, k, v, Pack(lengths), not causal, 0.0)) > 0.1
    assert seen == [0.0, 0.25]


def test_torchs_kernel_takes_strided_views_of_a_packed_projection() -> None:
    with FakeTensorMode():
        qkv = torch.empty(94, 3, 4, 64, dtype=torch.bfloat16)
        out = torch_varlen(*qkv.unbind(1), Pack((60, 34)), True, 0.0)
    assert out.shape == (94, 4, 64)
    assert out.dtype == torch.bfloat16


def shapes(lengths: tuple[int, ...]) -> list[tuple[int, int, bool]]:
    return [(*shape, mask is not None) for shape, mask in Pack(lengths).calls]


def test_short_neighbours_share_a_call_and_equal_ones_need_no_mask() -> None:
    assert shapes((512, 512, 300)) == [(2, 512, False), (1, 300, False)]
    assert shapes((10, 20, 34)) == [(1, 64, True)]
    assert shapes((10, 20, 35)) == [(1, 30, True), (1, 35, False)]
    assert shapes((8, 8, 8)) == [(3, 8, False)]
    assert shapes((3,) * 100) == [(100, 3, False)]
    assert shapes((70, 1, 2, 70)) == [(1, 70, False), (1, 3, True), (1, 70, False)]
    assert shapes(()) == []


def test_the_mask_keeps_pieces_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    (_, mask), *_ = Pack((2, 1, 3)).calls
    expected = torch.block_diag(torch.ones(2, 2), torch.ones(1, 1), torch.ones(3, 3)).bool()
    assert mask is not None
    assert torch.equal(mask, expected)
    lengths = (2, 1, 3, 5, 20, 4, 4, 4, 40, 40)
    q, k, v = random_qkv(sum(lengths))
    together = by_pieces(q, k, v, Pack(lengths), True, 0.0)
    monkeypatch.setattr(pack_module, "BLOCK", 0)
    alone = by_pieces(q, k, v, Pack(lengths), True, 0.0)
    assert all(mask is None for _, mask in Pack(lengths).calls)
    assert difference(together, alone) < 1e-13


def test_boundaries_are_where_pieces_begin() -> None:
    pack = Pack((3, 1, 4))
    assert pack.boundaries.tolist() == [0, 3, 4, 8]
    assert pack.boundaries is pack.boundaries  # made once for all layers
    assert pack.longest == 4


def weights_seen(causal: bool) -> Tensor:
    """Return the mean of attention's weights under dropout, by values that name their token."""
    torch.manual_seed(0)
    lengths = (3, 5)
    q, k, _ = torch.zeros(3, 8, 1, 8, dtype=torch.float64)
    v = torch.eye(8, dtype=torch.float64)[:, None]
    draws = [attend(q, k, v, Pack(lengths), causal=causal, dropout=0.5) for _ in range(2000)]
    return torch.stack(draws).mean(0)[:, 0]


def test_dropout_keeps_pieces_apart_and_the_mean() -> None:
    mean = weights_seen(causal=False)
    expected = torch.block_diag(torch.full((3, 3), 1 / 3), torch.full((5, 5), 1 / 5)).double()
    assert difference(mean, expected) < 0.05
    assert not mean[:3, 3:].any()
    assert not mean[3:, :3].any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1,), (40,) * 7, (130, 130), (300,), (5, 20, 9)])
def test_products_are_attention(causal: bool, lengths: tuple[int, ...]) -> None:
    """In fp64, where they are not used, for here they can be compared to the last digit."""
    pack = Pack(lengths)
    ((shape, mask),) = pack.calls
    ours, theirs = (random_qkv(sum(lengths)).requires_grad_() for _ in range(2))
    if causal and mask is not None:
        mask = mask.tril()
    q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in ours.unbind())
    products = by_products(q, k, v, mask, causal=causal, dropout=0.0)
    out = products.transpose(1, 2).flatten(0, 1)
    expected = dense(*theirs.unbind(), lengths, causal=causal)
    assert difference(out, expected) < 1e-13
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    gradients = [
        torch.autograd.grad((y * weights).sum(), x)[0] for y, x in ((out, ours), (expected, theirs))
    ]
    assert difference(*gradients) < 1e-12


@pytest.mark.parametrize("causal", [False, True])
def test_bf16_on_a_cpu_is_near_the_exact_form(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = (3, 9, 200, 64, 64, 520)
    used = []
    monkeypatch.setattr(
        attention, "by_products", lambda *qkv, **how: used.append(1) or by_products(*qkv, **how)
    )
    low = random_qkv(sum(lengths)).bfloat16()
    out = attend(*low.unbind(), Pack(lengths), causal=causal)
    expected = dense(*low.double().unbind(), lengths, causal=causal)
    assert out.dtype == torch.bfloat16
    assert float((out.double() - expected).norm() / expected.norm()) < 6e-3
    assert len(used) == 2  # all but the shortest and the longest pieces
    used.clear()
    attend(*low.float().unbind(), Pack(lengths), causal=causal)
    assert not used


def test_dropout_of_products_keeps_the_mean() -> None:
    torch.manual_seed(0)
    q, k, v = random_qkv(6).bfloat16().unbind()
    draws = [attend(q, k, v, Pack((6,)), causal=False, dropout=0.5) for _ in range(2000)]
    mean = torch.stack(draws).double().mean(0)
    assert difference(mean, dense(q, k, v, (6,), causal=False)) < 0.1
    assert len({float(draw.sum()) for draw in draws}) > 100
