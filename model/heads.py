"""What stands on the encoder: the language-model head, masked or causal.

Shapes: T tokens, N targets, C hidden size, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.encoder import RoFormer


class LanguageModelHead(nn.Module):
    """BERT's head: projection, GELU, LayerNorm; the word embeddings as decoder, with a bias."""

    def __init__(self, config: ModelConfig, *, vocab_size: int) -> None:
        super().__init__()
        self.transform = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, hidden_NC: Tensor, words_VC: Tensor) -> Tensor:
        """Return logits [N, V]; the decoder is passed in, so a state dict holds it only once."""
        return F.linear(self.norm(F.gelu(self.transform(hidden_NC))), words_VC, self.bias)


class LanguageModel(nn.Module):
    """The encoder with its head: logits where there are targets, and nowhere else."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        causal: bool = False,
        checkpoint_layers: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.encoder = RoFormer(
            config, vocab_size=vocab_size, causal=causal, checkpoint_layers=checkpoint_layers
        )
        self.head = LanguageModelHead(config, vocab_size=vocab_size)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        lengths: tuple[int, ...],
        target_index: Tensor,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """Return logits [N, V] of the tokens at target_index [N]; the rest as for the encoder."""
        hidden_NC = self.encoder(input_ids, positions, lengths, token_types, select=target_index)
        return self.head(hidden_NC, self.encoder.embeddings.words.weight)
