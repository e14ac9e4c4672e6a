"""Counted floating-point operations of training: what MFU is computed from.

Matrix products only, 2 operations a multiply-add; the backward pass costs twice the forward.
Recomputation by activation checkpointing is not useful work and is not counted.
"""

from collections.abc import Iterable

from model.config import ModelConfig


def training_flops(
    config: ModelConfig, vocab_size: int, lengths: Iterable[int], num_targets: int
) -> int:
    """Return the operations of one forward and backward pass over packed documents.

    Args:
        config: The model's sizes.
        vocab_size: Rows of the tied decoder.
        lengths: Tokens of each piece; attention is counted within pieces only.
        num_targets: Tokens whose logits are computed; what follows the last attention is computed
            for them alone.
    """
    pieces = tuple(lengths)
    tokens, width, inner = sum(pieces), config.hidden_size, config.intermediate_size
    mixing = tokens * 3 * width * width + sum(n * n for n in pieces) * 2 * width
    after = width * width + 2 * width * inner
    full_layers = (config.num_layers - 1) * (mixing + tokens * after)
    last_layer = mixing + num_targets * after  # see RoFormer.forward's `select`
    head = num_targets * (width * width + width * vocab_size)
    return 6 * (full_layers + last_layer + head)
