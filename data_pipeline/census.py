"""What a corpus holds, counted while it is tokenized."""

from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np

LENGTH_CLASSES = 40
"""Class c of the histogram holds the lengths from 2**(c-1) to 2**c - 1, class 0 the length 0."""


@dataclass(frozen=True, slots=True)
class Census:
    """Counts of documents and tokens; sums of them count what they were made of together."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    """Of text, as UTF-8."""
    unknown: int = 0
    """Tokens that stand for no piece of the vocabulary: [UNK], or a byte in its stead."""
    blank: int = 0
    """Texts of white space alone, passed over."""
    skipped: int = 0
    """Texts or files that could not be read, where `corpus.on_error` is skip."""
    lengths: tuple[int, ...] = field(default=(0,) * LENGTH_CLASSES)
    """Documents by length, in classes of powers of two."""

    def __add__(self, other: Self) -> "Census":
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)[:-1]}
        lengths = tuple(a + b for a, b in zip(self.lengths, other.lengths, strict=True))
        return Census(**sums, lengths=lengths)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text that a token stands for."""
        return self.bytes / max(1, self.tokens)

    @property
    def unknown_rate(self) -> float:
        """Share of tokens that stand for no piece of the vocabulary."""
        return self.unknown / max(1, self.tokens)

    def summary(self) -> dict[str, Any]:
        """Return what is worth keeping, as JSON."""
        return {
            "bytes": self.bytes,
            "bytes_per_token": round(self.bytes_per_token, 4),
            "unknown_rate": round(self.unknown_rate, 6),
            "blank": self.blank,
            "skipped": self.skipped,
            "lengths": {str(2**c - 1): n for c, n in enumerate(self.lengths) if n},
        }


def histogram(lengths: np.ndarray) -> tuple[int, ...]:
    """Count `lengths` by class."""
    classes = np.frexp(lengths.astype(np.float64))[1]  # the number of binary digits
    return tuple(np.bincount(classes, minlength=LENGTH_CLASSES).tolist())
