"""The loss of targets, at once and in parts, against fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model import loss as loss_module
from model.loss import Loss, decoder_loss, token_loss
from tests.model.helpers import difference

N, C, V = 10, 6, 23


def random_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, words, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((N, C), (V, C), (V,))
    )
    return x, words, bias, torch.randint(V, (N,), generator=generator)


def gradients(loss: Loss, inputs: tuple[Tensor, ...], scale: float) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss.total * scale, inputs[:3])


def test_loss_is_a_sum_in_fp32_over_targets() -> None:
    logits = torch.randn(20, 11, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(20) % 11
    loss = token_loss(logits, targets)
    exact = -torch.log_softmax(logits.double(), -1)[torch.arange(20), targets].sum()
    assert float(loss.total) == pytest.approx(float(exact), rel=1e-6)
    assert int(loss.correct) == int((logits.argmax(-1) == targets).sum())
    low = token_loss(logits.bfloat16(), targets)
    assert low.total.dtype == torch.float32
    exact_of_low = F.cross_entropy(logits.bfloat16().double(), targets, reduction="sum")
    assert float(low.total) == pytest.approx(float(exact_of_low), rel=1e-6)


@pytest.mark.parametrize("max_targets", [None, 1, 3, 5, 9, 10, 1000])
def test_every_cut_gives_the_same_loss_and_gradients(max_targets: int | None) -> None:
    inputs = random_inputs()
    expected = token_loss(F.linear(*inputs[:3]), inputs[3])
    loss = decoder_loss(*inputs, max_targets=max_targets)
    assert difference(loss.total, expected.total) < 1e-12
    assert int(loss.correct) == int(expected.correct) > 0
    for ours, theirs in zip(
        gradients(loss, inputs, 0.37), gradients(expected, inputs, 0.37), strict=True
    ):
        assert difference(ours, theirs) < 1e-13


def test_the_comparison_sees_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_inputs()
    expected = gradients(token_loss(F.linear(*inputs[:3]), inputs[3]), inputs, 1.0)
    made = decoder_loss(*inputs, max_targets=3)
    monkeypatch.setattr(loss_module, "HEADROOM", 2.0**11)  # in the backward pass alone
    for ours, theirs in zip(gradients(made, inputs, 1.0), expected, strict=True):
        assert difference(ours, theirs) > 0.1


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_parts_in_low_precision_are_as_near_to_fp64_as_the_whole(
    dtype: torch.dtype, tolerance: float
) -> None:
    inputs = random_inputs(dtype)
    wide = tuple(x.detach().double().requires_grad_() for x in inputs[:3])
    exact = token_loss(F.linear(*wide), inputs[3])
    loss = decoder_loss(*inputs, max_targets=3)
    assert loss.total.dtype == torch.float32
    assert float(loss.total.detach()) == pytest.approx(float(exact.total.detach()), rel=tolerance)
    for ours, theirs, given in zip(
        gradients(loss, inputs, 1.0), gradients(exact, wide, 1.0), inputs[:3], strict=True
    ):
        assert ours.dtype == given.dtype
        assert difference(ours.double(), theirs) < tolerance * float(theirs.abs().max())


def test_a_rare_words_gradient_outlives_fp16() -> None:
    """A probability of 1e-8 is below fp16's least number, and not so once it is scaled."""
    x = torch.ones(2, 1, dtype=torch.float16, requires_grad=True)
    words = torch.zeros(3, 1, dtype=torch.float16, requires_grad=True)
    bias = torch.tensor([0.0, -18.0, 0.0], dtype=torch.float16, requires_grad=True)
    loss = decoder_loss(x, words, bias, torch.tensor([0, 2]), max_targets=1)
    (gradient,) = torch.autograd.grad(loss.total * 65536.0, words)
    assert float(gradient[1]) == pytest.approx(65536 * 2 * 0.5 * 1.523e-8, rel=0.02)


def test_no_targets_give_a_zero_that_can_be_differentiated() -> None:
    x, words, bias, targets = random_inputs()
    for max_targets in (None, 1):
        loss = decoder_loss(x[:0], words, bias, targets[:0], max_targets=max_targets)
        assert float(loss.total.detach()) == 0.0
        assert all(not g.any() for g in torch.autograd.grad(loss.total, (x, words, bias)))


def test_without_gradients_nothing_is_kept() -> None:
    inputs = random_inputs()
    with torch.no_grad():
        loss = decoder_loss(*inputs, max_targets=3)
    assert not loss.total.requires_grad
    assert difference(loss.total, decoder_loss(*inputs, max_targets=None).total) < 1e-12


def test_logits_in_hand_stay_within_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    linear = F.linear

    def counting(x: Tensor, *rest: Tensor) -> Tensor:
        rows.append(len(x))
        return linear(x, *rest)

    monkeypatch.setattr(loss_module.F, "linear", counting)
    decoder_loss(*random_inputs(), max_targets=4)
    assert rows == [4, 4, 2]
