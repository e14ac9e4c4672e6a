"""Several weighted sources, from which each row of the run takes one.

Which source row j takes is a function of j and the weights alone: where j steps of the golden ratio
end on a circle that is cut by weight. Any stretch of n rows then has each source's share to within
a few rows, not within sqrt(n) of it as drawn ones would, and there is no state to keep.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256

import numpy as np

from data_pipeline.config import Packing
from data_pipeline.lanes import Cursor, deal
from data_pipeline.reading import Shards

STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: no other step spreads as evenly


@dataclass(frozen=True, eq=False)
class Mixture:
    """Sources of shards with their weights; a weight of 0 leaves one out."""

    names: tuple[str, ...]
    """What stages and metrics call them; a single source has none."""
    sources: tuple[Shards, ...]
    weights: tuple[float, ...]
    packing: Packing = "packed"
    """How rows are filled."""

    @property
    def sha256(self) -> str:
        """Fingerprint of all sources."""
        hashes = [source.sha256 for source in self.sources]
        return hashes[0] if len(hashes) == 1 else sha256(json.dumps(hashes).encode()).hexdigest()

    @property
    def shares_by_name(self) -> dict[str, float]:
        """Each source's part of all rows; they add up to 1."""
        total = sum(self.weights)
        return {
            name: round(weight / total, 9)
            for name, weight in zip(self.names, self.weights, strict=True)
        }

    def weighed(self, weights: Mapping[str, float] | None) -> "Mixture":
        """Return the same sources with a stage's weights; those it does not name get none."""
        if weights is None:
            return self
        return replace(self, weights=tuple(weights.get(name, 0.0) for name in self.names))

    @cached_property
    def _ends(self) -> np.ndarray:
        """Where each source's part of the circle ends, float64 [sources]."""
        ends = np.cumsum(self.weights) / sum(self.weights)
        ends[np.flatnonzero(self.weights)[-1] :] = 1.0
        return ends

    def sources_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the source of each of the run's rows, int64 [rows]."""
        if len(self.sources) == 1:
            return np.zeros(len(rows), dtype=np.int64)
        places = rows.astype(np.uint64) * np.uint64(STEP)  # modulo the circle of 2^64
        # Of 64 bits, the 53 that a float64 holds exactly: 1.0 is never reached.
        return np.searchsorted(self._ends, (places >> np.uint64(11)) / 2.0**53, side="right")

    def source_of(self, row: int) -> int:
        """Return the source of one row."""
        return int(self.sources_of(np.array([row]))[0]) if len(self.sources) > 1 else 0

    def shares(self, first_row: int, num_rows: int) -> list[int]:
        """Return how many rows each source gives to rows `first_row`, `first_row` + 1, ..."""
        rows = np.arange(first_row, first_row + num_rows)
        return np.bincount(self.sources_of(rows), minlength=len(self.sources)).tolist()

    def epochs(
        self, source: int, tokens: int, seed: int, lanes: int, cursors: Mapping[int, Cursor]
    ) -> float:
        """Return how often a source was read through, after `tokens` of it.

        Where its tokens are not known, or padded, `cursors` tell it, by the shards that their lanes
        have read.
        """
        shards = self.sources[source]
        if shards.epoch_tokens is not None and self.packing == "packed":
            return tokens / max(shards.epoch_tokens, 1)
        seed = source_seed(seed, source)
        read = [
            cursor.epoch + cursor.shard / len(deal(shards, seed, cursor.epoch, lanes)[name % lanes])
            for name, cursor in cursors.items()
            if name // lanes == source
        ]
        return sum(read) / max(len(read), 1)


def as_mixture(data: Shards | Mixture) -> Mixture:
    """Return a single source as a mixture of one."""
    return data if isinstance(data, Mixture) else Mixture(("",), (data,), (1.0,))


def source_seed(seed: int, source: int) -> int:
    """Return the seed of a source's order: the run's own for the first, another for each other."""
    return seed ^ (source << 40)
