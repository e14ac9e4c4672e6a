"""Random numbers that depend on a key alone, not on what was drawn before.

Keys of different lengths never meet, so the length of a key names its use:

    (seed,)                                            documents of a bucket over shards
    (seed, epoch)                                      shards over lanes
    (seed, epoch, shard)                               documents within a shard
    (seed, unit, piece, 0, 0)                          documents of a piece over buckets
    (seed, lane, epoch, shard, document, offset)       masks of the row that starts there
"""

import struct
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence


def generator(*key: int) -> np.random.Generator:
    """Return the counter-based generator of `key`: the same numbers on any machine."""
    packed = struct.pack(f"<{len(key)}q", *key)
    digest = blake2b(packed, digest_size=16).digest()
    return np.random.Generator(np.random.Philox(_Key(digest)))  # type: ignore[arg-type]


class _Key(ISeedSequence):
    """The key of a Philox generator, which it would else draw entropy beside, in twice the time."""

    def __init__(self, digest: bytes) -> None:
        self._words = np.frombuffer(digest, dtype="<u8")

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        return self._words
