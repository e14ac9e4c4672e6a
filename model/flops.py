"""Counted floating-point operations of training: what MFU is computed from.

Matrix products only, 2 operations a multiply-add; the backward pass costs twice the forward.
Recomputation by activation checkpointing is not useful work and is not counted.
"""

from collections.abc import Iterable

from model.config import ModelConfig
from model.linear_attention import chunks_of


def training_flops(
    config: ModelConfig,
    vocab_size: int,
    lengths: Iterable[int],
    num_targets: int,
    *,
    causal: bool = False,
) -> int:
    """Return the operations of one forward and backward pass over packed documents.

    Args:
        config: The model's sizes.
        vocab_size: Rows of the tied decoder.
        lengths: Tokens of each piece; attention is counted within pieces only.
        num_targets: Tokens whose logits are computed; what follows the last attention is computed
            for them alone.
        causal: Whether tokens see only those before them. Softmax is counted whole either way, as
            is usual; linear attention needs a causal form of its own.
    """
    pieces = tuple(lengths)
    tokens, width, inner = sum(pieces), config.hidden_size, config.intermediate_size
    attention = {"softmax": _softmax, "linear": _linear}[config.attention]
    mixing = tokens * 3 * width * width + sum(attention(config, n, causal) for n in pieces)
    # favor's projections are constants: 2 products a step, and not 3 as for weights
    constant = 2 * tokens * width * config.num_features if config.has_random_features else 0
    after = width * width + 2 * width * inner
    full_layers = (config.num_layers - 1) * (mixing + tokens * after)
    last_layer = mixing + num_targets * after  # see RoFormer.forward's `select`
    head = num_targets * (width * width + width * vocab_size)
    return 6 * (full_layers + last_layer + head) + 4 * config.num_layers * constant


def _softmax(config: ModelConfig, length: int, causal: bool) -> int:
    """Count the multiply-adds of one layer's attention forward: scores and weighted values."""
    return 2 * length * length * config.hidden_size


def _linear(config: ModelConfig, length: int, causal: bool) -> int:
    """Count those of model.linear_attention's eq. 19.

    A causal piece is counted in the chunks that it is computed in, their padding included, which is
    less than one token a chunk.
    """
    features, size = config.query_size, config.head_size
    if not causal:  # k v^T, its product with q, and the denominator
        products = length * (2 * features * size + features)
    else:
        num_chunks, chunk = chunks_of(length)
        within = chunk * (features + size)
        between = 2 * features * size if num_chunks > 1 else 0
        products = num_chunks * chunk * (within + between)
    return config.num_heads * products
