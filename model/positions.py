"""How the model learns the order of tokens: four kinds, one class each.

A kind may add to the embeddings (learned and sinusoidal: section 2.2 of the paper, eq. 3 and 4), or
turn queries and keys inside the attention (rope: section 3.2, eq. 14-16), or do nothing.

Shapes: T tokens, C hidden size, D head size, R = D/2 rotated pairs, P positions of a table.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model.config import ModelConfig
from model.kernels.rotary import rotate

Rotate = Callable[[Tensor], Tensor]
"""Turns queries or keys [T, H, D] by the angles of their tokens."""


def angles(num_positions: int, size: int, base: float) -> NDArray[np.float64]:
    """Return m * theta_i with theta_i = base^(-2i/size) (eq. 15, i from 0): fp64 [P, size/2]."""
    theta = base ** (-np.arange(0, size, 2) / size)
    return np.outer(np.arange(num_positions), theta)


class Table:
    """Constant rows, fp32 whatever becomes of the module that owns them.

    An engine casts parameters and buffers to its precision, and bf16 angles are off by radians;
    this is neither. numpy makes it, because ZeRO-3's constructor patches torch's factories.
    """

    def __init__(self, values: NDArray[np.float64]) -> None:
        self.values = torch.from_numpy(values.astype(np.float32))
        self._moved = self.values

    def __getitem__(self, index: Tensor) -> Tensor:
        """Return the rows at index, on index's device."""
        if self._moved.device != index.device:
            self._moved = self.values.to(index.device)
        return self._moved[index]


class Positions(nn.Module):
    """The kind "none", and the two places where the others act."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    def embed(self, x_TC: Tensor, positions_T: Tensor) -> Tensor:
        """Return the embeddings with their positions."""
        return x_TC

    def rotation(self, positions_T: Tensor) -> Rotate | None:
        """Return what turns queries and keys, if anything does."""
        return None


class LearnedPositions(Positions):
    """A trained vector for each position, as in BERT."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.max_positions, config.hidden_size)

    def embed(self, x_TC: Tensor, positions_T: Tensor) -> Tensor:
        """Add the vectors (eq. 3)."""
        return x_TC + self.embedding(positions_T)


class SinusoidalPositions(Positions):
    """The fixed waves of Attention Is All You Need, sine and cosine interleaved (eq. 4)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        angles_PR = angles(config.max_positions, config.hidden_size, 10000.0)
        waves_PR2 = np.stack([np.sin(angles_PR), np.cos(angles_PR)], axis=-1)
        self.waves = Table(waves_PR2.reshape(config.max_positions, config.hidden_size))
        # That paper's section 3.4: without it, waves of size 1 would drown embeddings of size 0.02.
        self.scale = config.hidden_size**0.5

    def embed(self, x_TC: Tensor, positions_T: Tensor) -> Tensor:
        """Add the waves to the scaled embeddings."""
        return (x_TC * self.scale + self.waves[positions_T]).to(x_TC.dtype)


class RotaryPositions(Positions):
    """RoPE: q_m and k_n are turned by m and n, so their product knows n - m alone (eq. 16)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        angles_PR = angles(config.max_positions, config.num_turned, config.rope_base)
        self.cos = Table(np.cos(angles_PR))
        self.sin = Table(np.sin(angles_PR))

    def rotation(self, positions_T: Tensor) -> Rotate:
        """Look the angles up once for all layers."""
        return partial(rotate, cos_TR=self.cos[positions_T], sin_TR=self.sin[positions_T])


POSITIONS: dict[str, type[Positions]] = {
    "rope": RotaryPositions,
    "learned": LearnedPositions,
    "sinusoidal": SinusoidalPositions,
    "none": Positions,
}
