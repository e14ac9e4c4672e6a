"""How the model learns the order of tokens: four kinds, one class each.

A kind may add to the embeddings (learned and sinusoidal: section 2.2 of the paper, eq. 3 and 4), or
turn queries and keys inside the attention (rope: section 3.2, eq. 14-16), or do nothing.

Shapes: T tokens, C hidden size, D head size, R = D/2 rotated pairs, P positions of a table.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model.config import ModelConfig
from model.kernels.rotary import rotate, rotate_qk


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

    def on(self, device: torch.device) -> Tensor:
        """Return the whole table on a device; the last one asked for is kept."""
        if self._moved.device != device:
            self._moved = self.values.to(device)
        return self._moved

    def __getitem__(self, index: Tensor) -> Tensor:
        """Return the rows at index, on index's device."""
        return self.on(index.device)[index]


class Rotate:
    """Turns what belongs to one pack by the angles of its tokens; made once for all layers.

    On a CPU the angles are looked up here. A GPU's kernel looks them up itself, by a number a token
    in a table that its cache holds, rather than reading 8 x R bytes a token.
    """

    def __init__(self, positions_T: Tensor, turns: Table, *, halves: bool = False) -> None:
        self.halves = halves
        self.rows_T: Tensor | None = None
        if positions_T.is_cuda:
            self.rows_T, self.turns_PR2 = positions_T.int(), turns.on(positions_T.device)
        else:
            self.turns_PR2 = turns[positions_T]

    def __call__(self, x_THD: Tensor) -> Tensor:
        """Return x turned, as a new tensor."""
        turns = self.turns_PR2 if self.rows_T is None else self.turns_PR2[self.rows_T]
        return rotate(x_THD, *turns.unbind(-1), halves=self.halves)

    def split(self, qkv_T3HD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return turned q and k, and v, of a packed projection, which is written over."""
        return rotate_qk(qkv_T3HD, self.rows_T, self.turns_PR2, halves=self.halves)


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
        angles_PR = angles(config.max_positions, config.turned_size, config.rope_base)
        self.halves = config.rope_pairs == "halves"
        self.turns = Table(np.stack([np.cos(angles_PR), np.sin(angles_PR)], axis=-1))

    def rotation(self, positions_T: Tensor) -> Rotate:
        """Return what turns a pack with these positions."""
        return Rotate(positions_T, self.turns, halves=self.halves)


POSITIONS: dict[str, type[Positions]] = {
    "rope": RotaryPositions,
    "learned": LearnedPositions,
    "sinusoidal": SinusoidalPositions,
    "none": Positions,
}
