"""What the model is fed: one row as an example, many as a batch without padding.

L = tokens of a row, T = tokens of a batch, N = targets.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate, chain

import numpy as np
import torch

from data_pipeline.lanes import Cursor, Row
from data_pipeline.reading import Fault

IGNORED = -100  # the label of a token that is no target


@dataclass(frozen=True, slots=True)
class Example:
    """A row with its targets: what a loader process hands over, and no more."""

    input_ids: np.ndarray
    """int64 [L]."""
    lengths: tuple[int, ...]
    """Tokens of each piece; their sum is L."""
    target_index: np.ndarray
    """int64 [N], ascending: the places in the row where the model is asked."""
    targets: np.ndarray
    """int64 [N]: the right ids there."""
    lane: int
    cursor: Cursor
    """The lane's place after this row."""
    faults: tuple[Fault, ...] = ()
    """What was left out on the way to this row."""

    @property
    def digest(self) -> int:
        """63-bit hash of input ids, labels and positions."""
        labels = np.full(len(self.input_ids), IGNORED)
        labels[self.target_index] = self.targets
        hashed = blake2b(digest_size=8)
        for field in (self.input_ids, labels, _positions(self.lengths)):
            hashed.update(field.astype("<i8", copy=False).data)
        return int.from_bytes(hashed.digest(), "little") >> 1


def make_example(
    row: Row, input_ids: np.ndarray, target_index: np.ndarray, targets: np.ndarray
) -> Example:
    """Return the example that shows `input_ids` [L] of a row and asks for `targets` [N]."""
    return Example(input_ids, row.lengths, target_index, targets, row.lane, row.cursor, row.faults)


def _positions(lengths: Sequence[int]) -> np.ndarray:
    """Return positions int64 [sum of lengths], from 0 within each piece."""
    sizes = np.array(lengths, dtype=np.int64)
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows end to end; `lengths` keeps their pieces, and so attention and positions, apart."""

    input_ids: torch.Tensor
    """int64 [T]."""
    positions: torch.Tensor
    """int64 [T]."""
    lengths: tuple[int, ...]
    """Tokens of each piece; their sum is T. On the host, where kernels are chosen by it."""
    target_index: torch.Tensor
    """int64 [N], into the T tokens."""
    targets: torch.Tensor
    """int64 [N]."""
    cursors: dict[int, Cursor]
    """The place after the last row of each lane that has one here."""
    examples: tuple[Example, ...] = ()
    """The rows that it is made of, in order."""

    @property
    def digests(self) -> tuple[int, ...]:
        """Each row's, in order; they are computed when they are asked for."""
        return tuple(example.digest for example in self.examples)

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What was left out on the way to these rows."""
        return tuple(chain.from_iterable(example.faults for example in self.examples))

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    @property
    def num_targets(self) -> int:
        """N."""
        return len(self.targets)

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch with its tensors on `device`, without waiting for a GPU."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            pinned = tensor.pin_memory() if torch.device(device).type == "cuda" else tensor
            return pinned.to(device, non_blocking=True)

        return replace(
            self,
            input_ids=moved(self.input_ids),
            positions=moved(self.positions),
            target_index=moved(self.target_index),
            targets=moved(self.targets),
        )


def collate(examples: Sequence[Example]) -> Batch:
    """Join examples in order; none at all make an empty batch."""
    starts = accumulate((len(example.input_ids) for example in examples), initial=0)
    lengths = tuple(chain.from_iterable(example.lengths for example in examples))
    return Batch(
        input_ids=_join([example.input_ids for example in examples]),
        positions=torch.from_numpy(_positions(lengths)),
        lengths=lengths,
        target_index=_join(
            [example.target_index + start for example, start in zip(examples, starts, strict=False)]
        ),
        targets=_join([example.targets for example in examples]),
        cursors={example.lane: example.cursor for example in examples},
        examples=tuple(examples),
    )


def _join(arrays: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *arrays]))
