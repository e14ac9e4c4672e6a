"""The attention core against a dense masked softmax in fp64."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.attention import SoftmaxCore
from model.kernels.rotary import rotate
from model.pack import Pack
from model.positions import Rotate, angles
from tests.model.helpers import difference, restarting, small_config

H, D = 2, 6


def dense(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, causal: bool) -> Tensor:
    """Eq. 2 over the whole pack, one block of the mask a document."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    allowed = document[:, None] == document[None, :]
    if causal:
        allowed &= torch.ones_like(allowed).tril()
    scores = torch.einsum("mhd,nhd->hmn", q, k) / D**0.5
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("hmn,nhd->mhd", weights, v)


def rotation(lengths: tuple[int, ...]) -> Rotate:
    turns = torch.from_numpy(angles(64, D, 10000.0))[restarting(lengths)]
    return partial(rotate, cos_TR=turns.cos(), sin_TR=turns.sin())


def random_qkv(num_tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, num_tokens, H, D, dtype=torch.float64, generator=generator)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 3, 3, 3, 17]), min_size=1, max_size=8).map(tuple),
    causal=st.booleans(),
    turned=st.booleans(),
)
def test_values_and_gradients_equal_the_dense_form(
    lengths: tuple[int, ...], causal: bool, turned: bool
) -> None:
    core = SoftmaxCore(small_config(), causal=causal)
    turn = rotation(lengths) if turned else None
    ours, theirs = (random_qkv(sum(lengths)).requires_grad_() for _ in range(2))
    out = core(*ours.unbind(), rotate=turn, pack=Pack(lengths))
    q, k, v = theirs.unbind()
    if turn is not None:
        q, k = turn(q), turn(k)
    expected = dense(q, k, v, lengths, causal=causal)
    assert difference(out, expected) < 1e-13
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    gradients = [
        torch.autograd.grad((y * weights).sum(), x)[0] for y, x in ((out, ours), (expected, theirs))
    ]
    assert difference(*gradients) < 1e-13


def test_the_comparison_sees_a_leak_a_lost_mask_and_a_turned_value() -> None:
    lengths = (5, 5, 3)
    q, k, v = random_qkv(13)
    turn = rotation(lengths)
    core = SoftmaxCore(small_config(), causal=True)
    out = core(q, k, v, rotate=turn, pack=Pack(lengths))
    q, k = turn(q), turn(k)
    assert difference(out, dense(q, k, v, lengths, causal=True)) < 1e-13
    assert difference(out, dense(q, k, v, (13,), causal=True)) > 0.1
    assert difference(out, dense(q, k, v, (5, 3, 5), causal=True)) > 0.1
    assert difference(out, dense(q, k, v, lengths, causal=False)) > 0.1
    assert difference(out, dense(q, k, turn(v), lengths, causal=True)) > 0.1


def test_values_are_not_rotated() -> None:
    """A token that sees only itself gets its own value back, wherever it stands."""
    q, k, v = random_qkv(4)
    positions = np.array([0, 3, 20, 63])
    turns = torch.from_numpy(angles(64, D, 10000.0)[positions])
    turn = partial(rotate, cos_TR=turns.cos(), sin_TR=turns.sin())
    core = SoftmaxCore(small_config(), causal=False)
    assert torch.equal(core(q, k, v, rotate=turn, pack=Pack((1, 1, 1, 1))), v)
    assert difference(turn(v)[1:], v[1:]) > 0.5


def test_an_empty_pack_stays_in_the_graph() -> None:
    qkv = random_qkv(0).requires_grad_()
    core = SoftmaxCore(small_config(), causal=False)
    out = core(*qkv.unbind(), rotate=rotation(()), pack=Pack(()))
    out.sum().backward()
    assert out.shape == (0, H, D)
    assert qkv.grad is not None


@pytest.mark.parametrize("lengths", [(), (3,), (3, 3)])
def test_lengths_that_do_not_cover_the_pack_are_refused(lengths: tuple[int, ...]) -> None:
    core = SoftmaxCore(small_config(), causal=False)
    with pytest.raises(RuntimeError, match="split_sizes"):
        core(*random_qkv(5), rotate=None, pack=Pack(lengths))


def test_attention_dropout_acts_in_training_only() -> None:
    core = SoftmaxCore(small_config(attention_dropout=0.5), causal=False)
    q, k, v = random_qkv(12)
    lengths = (12,)
    torch.manual_seed(0)
    noisy = core(q, k, v, rotate=None, pack=Pack(lengths))
    exact = core.eval()(q, k, v, rotate=None, pack=Pack(lengths))
    assert difference(exact, dense(q, k, v, lengths, causal=False)) < 1e-13
    assert difference(noisy, exact) > 0.1
