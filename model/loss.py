"""Cross-entropy of the targets, with their logits in hand at once or in parts.

Losses are sums over targets, never means, so that any split of a batch over ranks, micro-batches
and parts adds up to the same number. They are fp32 whatever the model's type.

Shapes: N targets, C hidden size, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

HEADROOM = 2.0**12
"""Gradients kept between the passes are held times this, or fp16 would lose those of rare words."""


class Loss(NamedTuple):
    """Sums over the targets of a batch."""

    total: Tensor
    """Negative log-likelihood, nats, fp32."""
    correct: Tensor
    """Targets that the model ranks first."""


def token_loss(logits_NV: Tensor, targets_N: Tensor) -> Loss:
    """Return the loss of logits, in fp32 or wider whatever their precision."""
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    total = F.cross_entropy(logits_NV.to(wide), targets_N, reduction="sum")
    return Loss(total, (logits_NV.detach().argmax(-1) == targets_N).sum())


def decoder_loss(
    x_NC: Tensor, words_VC: Tensor, bias_V: Tensor, targets_N: Tensor, *, max_targets: int | None
) -> Loss:
    """Return the loss of the logits x words^T + bias; no more than `max_targets` rows at a time.

    The parts' gradients are made in the forward pass, while their logits are there: no product is
    done twice, and a gradient of words in fp32 is what is kept for the backward pass.
    """
    if max_targets is None or len(targets_N) <= max_targets:
        return token_loss(F.linear(x_NC, words_VC, bias_V), targets_N)
    return Loss(*_InParts.apply(x_NC, words_VC, bias_V, targets_N, max_targets))


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NC: Tensor,
        words_VC: Tensor,
        bias_V: Tensor,
        targets_N: Tensor,
        max_targets: int,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(x_NC.dtype, torch.float32)
        total, correct = x_NC.new_zeros((), dtype=wide), targets_N.new_zeros(())
        differentiates = any(ctx.needs_input_grad)
        dx_NC = torch.empty_like(x_NC) if differentiates else None
        dwords_VC = torch.zeros_like(words_VC, dtype=wide) if differentiates else None
        dbias_V = torch.zeros_like(bias_V, dtype=wide) if differentiates else None
        for first in range(0, len(targets_N), max_targets):
            part = slice(first, first + max_targets)
            x, targets = x_NC[part], targets_N[part]
            logits = F.linear(x, words_VC, bias_V)
            correct += (logits.argmax(-1) == targets).sum()
            log_p = logits.to(wide).log_softmax(-1)
            total -= log_p.gather(1, targets[:, None]).sum()
            if dx_NC is not None and dwords_VC is not None and dbias_V is not None:
                dlogits = log_p.exp_()  # softmax minus one at the target
                dlogits[torch.arange(len(targets), device=x.device), targets] -= 1
                dlogits *= HEADROOM
                dbias_V += dlogits.sum(0)
                low = dlogits.to(x.dtype)
                torch.mm(low, words_VC, out=dx_NC[part])
                dwords_VC += low.T @ x
        if differentiates:
            ctx.save_for_backward(dx_NC, dwords_VC, dbias_V)
        ctx.types = x_NC.dtype, words_VC.dtype, bias_V.dtype
        ctx.mark_non_differentiable(correct)
        return total, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        scale = scale / HEADROOM
        gradients = zip(ctx.saved_tensors, ctx.types, strict=True)
        return *((scale * gradient).to(dtype) for gradient, dtype in gradients), None, None
