"""What stands on the encoder: the language-model head, masked or causal, and its loss.

Shapes: T tokens, N targets, C hidden size, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.encoder import RoFormer
from model.loss import Loss, decoder_loss


class LanguageModelHead(nn.Module):
    """BERT's head: projection, GELU, LayerNorm; the word embeddings as decoder, with a bias."""

    def __init__(
        self, config: ModelConfig, *, vocab_size: int, max_targets: int | None = None
    ) -> None:
        super().__init__()
        self.transform = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        self.max_targets = max_targets

    def forward(self, hidden_NC: Tensor, words_VC: Tensor, targets_N: Tensor) -> Loss:
        """Return the loss; the decoder is passed in, so a state dict holds it only once."""
        x_NC = self.features(hidden_NC)
        return decoder_loss(x_NC, words_VC, self.bias, targets_N, max_targets=self.max_targets)

    def logits(self, hidden_NC: Tensor, words_VC: Tensor) -> Tensor:
        """Return logits [N, V]."""
        return F.linear(self.features(hidden_NC), words_VC, self.bias)

    def features(self, hidden_NC: Tensor) -> Tensor:
        """Return what the decoder is multiplied with [N, C]."""
        return self.norm(F.gelu(self.transform(hidden_NC)))


class LanguageModel(nn.Module):
    """The encoder with its head: asked where there are targets, and nowhere else."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        causal: bool = False,
        checkpoint_layers: bool = False,
        compile_layers: bool = False,
        max_targets: int | None = None,
    ) -> None:
        """Build it as the encoder; max_targets: rows of logits in hand at a time (default: all)."""
        super().__init__()
        self.config = config
        self.encoder = RoFormer(
            config,
            vocab_size=vocab_size,
            causal=causal,
            checkpoint_layers=checkpoint_layers,
            compile_layers=compile_layers,
        )
        self.head = LanguageModelHead(config, vocab_size=vocab_size, max_targets=max_targets)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        lengths: tuple[int, ...],
        target_index: Tensor,
        targets: Tensor,
        token_types: Tensor | None = None,
    ) -> Loss:
        """Return the loss of targets [N] asked at target_index [N]; the rest as for the encoder."""
        hidden_NC = self.encoder(input_ids, positions, lengths, token_types, select=target_index)
        loss: Loss = self.head(hidden_NC, self.encoder.embeddings.words.weight, targets)
        return loss

    def logits(
        self,
        input_ids: Tensor,
        positions: Tensor,
        lengths: tuple[int, ...],
        target_index: Tensor,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """Return the logits [N, V] there instead."""
        hidden_NC = self.encoder(input_ids, positions, lengths, token_types, select=target_index)
        return self.head.logits(hidden_NC, self.encoder.embeddings.words.weight)
