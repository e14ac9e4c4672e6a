"""The rotation against complex numbers in fp64, and the properties that the paper derives."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.kernels.rotary import rotate
from model.positions import angles
from tests.model.helpers import difference

T, H = 300, 3


def reference(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Eq. 12 generalised: pair i of x_m as a complex number, times e^(i m theta_i); fp64 loops."""
    x_THD, size = x.double().numpy(), x.shape[-1]
    out = np.empty_like(x_THD)
    for i in range(size // 2):
        turn = np.exp(1j * positions.numpy() * base ** (-2 * i / size))[:, None]
        pair = (x_THD[..., 2 * i] + 1j * x_THD[..., 2 * i + 1]) * turn
        out[..., 2 * i], out[..., 2 * i + 1] = pair.real, pair.imag
    return torch.from_numpy(out)


def tables(positions: Tensor, size: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    angles_TR = torch.from_numpy(angles(2048, size, 10000.0))[positions]
    return [angles_TR.cos().to(dtype), angles_TR.sin().to(dtype)]


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Llama's layout, (i, i + D/2): the mistake to catch."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def narrow(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The right pairs, multiplied in the type of the data: the mistake to catch."""
    a, b = x[..., ::2], x[..., 1::2]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)


@pytest.mark.parametrize("size", [2, 32, 48, 64, 96])
def test_equals_complex_reference(size: int) -> None:
    positions = torch.randint(1536, (T,), generator=torch.Generator().manual_seed(0))
    x = torch.randn(T, H, size, generator=torch.Generator().manual_seed(1))
    cos, sin = tables(positions, size)
    expected = reference(x, positions)
    assert difference(rotate(x, cos, sin), expected) < 1e-6
    assert difference(rotate(x, cos, -sin), expected) > 1.0
    assert difference(rotate(x, *tables(positions + 1, size)), expected) > 1.0
    if size > 2:
        assert difference(halves(x, cos, sin), expected) > 1.0


def test_is_written_as_in_equation_34() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    cos, sin = torch.tensor([[0.5, 0.25]]), torch.tensor([[2.0, 4.0]])
    expected = [1 * 0.5 - 2 * 2, 2 * 0.5 + 1 * 2, 3 * 0.25 - 4 * 4, 4 * 0.25 + 3 * 4]
    assert rotate(x, cos, sin).flatten().tolist() == expected


def test_is_the_identity_at_position_zero_only() -> None:
    x = torch.ones(T, H, 64)
    moved = (rotate(x, *tables(torch.arange(T), 64)) - x).abs().amax(dim=(1, 2))
    assert moved[0] == 0
    assert moved[1:].min() > 0.1


def test_keeps_the_norm_of_every_pair() -> None:
    x = torch.randn(T, H, 64, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, *tables(torch.arange(T), 64))
    assert (
        difference(
            turned.unflatten(-1, (-1, 2)).norm(dim=-1), x.unflatten(-1, (-1, 2)).norm(dim=-1)
        )
        < 1e-6
    )
    # Halves keep the vector's norm as well, but not that of the paper's pairs.
    other = halves(x, *tables(torch.arange(T), 64))
    assert difference(other.norm(dim=-1), x.norm(dim=-1)) < 1e-5
    assert (
        difference(other.unflatten(-1, (-1, 2)).norm(dim=-1), x.unflatten(-1, (-1, 2)).norm(dim=-1))
        > 0.5
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(m=st.integers(0, 500), n=st.integers(0, 500), shift=st.integers(0, 1000))
def test_products_depend_on_distance_alone(m: int, n: int, shift: int) -> None:
    q, k = torch.randn(2, 1, 1, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(m))

    def product(m: int, n: int) -> float:
        q_m = rotate(q, *tables(torch.tensor([m]), 64, torch.float64))
        k_n = rotate(k, *tables(torch.tensor([n]), 64, torch.float64))
        return (q_m * k_n).sum().item()

    assert product(m + shift, n + shift) == pytest.approx(product(m, n), abs=1e-10)


def test_products_change_with_distance_and_with_rounded_angles() -> None:
    x = torch.ones(1536, 1, 64)
    cos, sin = tables(torch.arange(1536), 64)

    def drift(cos: Tensor, sin: Tensor) -> float:
        """Return how much the products at distance 7 differ along the text."""
        turned = rotate(x, cos, sin)[:, 0]
        products = (turned[7:] * turned[:-7]).sum(-1)
        return (products.max() - products.min()).item()

    assert drift(cos, sin) < 1e-4
    theta = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    rounded = (torch.arange(1536).bfloat16()[:, None] * theta.bfloat16()).float()
    assert drift(rounded.cos(), rounded.sin()) > 10
    turned = rotate(x, cos, sin)[:, 0]
    assert (turned[0] @ turned[0] - turned[0] @ turned[7]).item() > 10


def test_gradient_is_the_opposite_rotation() -> None:
    positions = torch.arange(T)
    x = torch.randn(T, H, 32, requires_grad=True)
    gradient = torch.randn(T, H, 32, generator=torch.Generator().manual_seed(2))
    rotate(x, *tables(positions, 32)).backward(gradient)
    assert x.grad is not None
    assert difference(x.grad, reference(gradient, -positions)) < 1e-6
    assert difference(x.grad, reference(gradient, positions)) > 1.0


def test_gradcheck() -> None:
    x = torch.randn(5, 2, 6, dtype=torch.float64, requires_grad=True)
    cos, sin = tables(torch.arange(5), 6, torch.float64)
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), (x,))


@pytest.mark.parametrize(("dtype", "ulp"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_narrow_data_is_turned_in_fp32(dtype: torch.dtype, ulp: float) -> None:
    positions = torch.randint(1536, (T,), generator=torch.Generator().manual_seed(0))
    x = torch.randn(T, H, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = reference(x, positions)

    def relative_error(result: Tensor) -> float:
        assert result.dtype == dtype
        return ((result.double() - expected).abs() / expected.abs().clamp(min=1e-2)).max().item()

    cos, sin = tables(positions, 64)
    assert relative_error(rotate(x, cos, sin)) < 1.01 * ulp  # one rounding, at the end
    assert relative_error(narrow(x, cos.to(dtype), sin.to(dtype))) > 4 * ulp


def test_reads_strided_views_and_leaves_them_alone() -> None:
    qkv = torch.randn(T, 3, H, 32)
    before = qkv.clone()
    cos, sin = tables(torch.arange(T), 32)
    for x in qkv.unbind(1):
        assert torch.equal(rotate(x, cos, sin), rotate(x.contiguous(), cos, sin))
    assert torch.equal(qkv, before)
    assert rotate(qkv[:0, 0], cos[:0], sin[:0]).shape == (0, H, 32)


def test_long_range_decay_is_the_papers() -> None:
    """Eq. 37: the mean of |S_j| for d = 64; a trend that rises again beyond 512."""
    turns = np.exp(1j * angles(1537, 64, 10000.0))
    bound = np.abs(np.cumsum(turns, axis=1)).mean(axis=1)
    expected = {0: 16.5, 8: 9.92, 64: 5.70, 256: 3.84, 512: 2.99, 1024: 3.07, 1536: 5.71}
    assert {d: bound[d] for d in expected} == pytest.approx(expected, abs=0.006)
