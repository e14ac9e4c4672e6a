"""RoFormer: BERT's post-LayerNorm encoder, with the order of tokens given by rotation.

Notable:
- embeddings are words + token types, then LayerNorm and dropout; no position vectors with rope
- rotary positions turn queries and keys in every layer (eq. 14-16), values never
- exact (erf) GELU, biases everywhere, LayerNorm after each residual sum
- tokens are packed flat: no padding exists, documents attend to themselves only
- what follows the last attention is computed only for the tokens that somebody asks for

Shapes: T tokens of the pack, C hidden size, S selected tokens.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.attention import SelfAttention
from model.config import ModelConfig
from model.pack import Pack
from model.positions import POSITIONS, Rotate


class FeedForward(nn.Module):
    """Two projections with GELU between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x_TC: Tensor) -> Tensor:
        """Map every token by itself."""
        return self.down(F.gelu(self.up(x_TC)))


class Layer(nn.Module):
    """Attention and feed-forward, each added to its input and normalised after (post-LN)."""

    def __init__(
        self, config: ModelConfig, *, causal: bool, compile_tokenwise: bool = False
    ) -> None:
        super().__init__()
        self.attention = SelfAttention(config, causal=causal)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.compile_tokenwise = compile_tokenwise

    def forward(
        self,
        x_TC: Tensor,
        rotate: Rotate | None,
        pack: Pack,
        select: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output [T, C], or [S, C] of the selected tokens."""
        attended = self.attention(x_TC, rotate=rotate, pack=pack, select=select)
        x = x_TC if select is None else x_TC.index_select(0, select)
        return (tokenwise_compiled if self.compile_tokenwise else tokenwise)(self, x, attended)


def tokenwise(layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
    """Do what a layer does after its attention, to every token by itself."""
    x = layer.attention_norm(x + layer.dropout(attended))
    return layer.feed_forward_norm(x + layer.dropout(layer.feed_forward(x)))


def tokenwise_compiled(layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
    """Do the same by a graph that serves all layers, packs and stages.

    Weights and the number of tokens are its inputs, but for 0 and 1, of which torch.compile would
    make graphs of their own: they get rows that are dropped again. Going round the graph then would
    be wrong, for one rank alone would do so, and ZeRO 2 sums gradients over ranks in the order in
    which they come. Attention stays outside, for its calls follow the lengths of the pieces.
    """
    missing = max(0, 2 - len(x))
    if missing:
        x, attended = (F.pad(rows, (0, 0, 0, missing)) for rows in (x, attended))
    out = _graph()(layer, x, attended)
    return out[: len(out) - missing] if missing else out


@cache
def _graph() -> Callable[[Layer, Tensor, Tensor], Tensor]:
    # with the fallback, dropout draws what it draws without a graph
    return torch.compile(tokenwise, dynamic=True, options={"fallback_random": True})


class Embeddings(nn.Module):
    """Words, token types and, for the absolute kinds, positions; then LayerNorm and dropout."""

    def __init__(self, config: ModelConfig, *, vocab_size: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, config.hidden_size)
        self.token_types = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.positions = POSITIONS[config.positions](config)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, input_ids_T: Tensor, positions_T: Tensor, token_types_T: Tensor | None
    ) -> Tensor:
        """Return the input of the first layer [T, C]; without token types all are of type 0."""
        if token_types_T is None:
            token_types_T = positions_T.new_zeros(1)
        x_TC = self.words(input_ids_T) + self.token_types(token_types_T)
        return self.dropout(self.norm(self.positions.embed(x_TC, positions_T)))


class RoFormer(nn.Module):
    """The encoder."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        causal: bool = False,
        checkpoint_layers: bool = False,
        compile_layers: bool = False,
    ) -> None:
        """Build it with torch's own initial values; see `model.initialize` for the paper's.

        causal: tokens see only those before them. checkpoint_layers: keep only the layers' inputs
        for the backward pass and compute the rest again. compile_layers: fuse, by torch.compile,
        what each layer does after its attention.
        """
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config, vocab_size=vocab_size)
        self.layers = nn.ModuleList(
            Layer(config, causal=causal, compile_tokenwise=compile_layers)
            for _ in range(config.num_layers)
        )
        self.checkpoint_layers = checkpoint_layers

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        lengths: tuple[int, ...],
        token_types: Tensor | None = None,
        *,
        select: Tensor | None = None,
    ) -> Tensor:
        """Encode packed documents: input_ids [T] to hidden states [T, C].

        positions [T] restart at each piece of text. lengths: tokens of each piece, summing to T; a
        tuple, so that no device is waited for. token_types [T]: all 0 by default. select [S]: the
        tokens to return, as [S, C]; all by default. ValueError for a piece over max_positions.
        """
        pack = Pack(lengths, input_ids.device)
        if pack.longest > self.config.max_positions:
            raise ValueError(
                f"a piece of text has {pack.longest} tokens, but model.max_positions is "
                f"{self.config.max_positions}"
            )
        x = self.embeddings(input_ids, positions, token_types)
        rotate = self.embeddings.positions.rotation(positions)
        for layer in self.layers:
            selected = select if layer is self.layers[-1] else None
            if self.checkpoint_layers and self.training:
                x = checkpoint(layer, x, rotate, pack, selected, use_reentrant=False)
            else:
                x = layer(x, rotate, pack, selected)
        return x
