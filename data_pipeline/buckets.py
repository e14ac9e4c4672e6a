"""Buckets of tokenized documents to shards: the second half of a shuffle, in one pass.

A bucket's documents are dealt out to its shards by seed, and balanced. They come in their order,
and each is appended to its shard, so memory holds a bounded number of bytes that wait to be
written, whatever the corpus.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from hashlib import sha256
from itertools import chain
from math import ceil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import webdataset

from data_pipeline.seeding import generator
from data_pipeline.spool import read_lengths, read_slice, written

MIB = 2**20
MEMBER_OVERHEAD = 512 + 128 + 256  # tar header, array header, half a block of padding
WAITING_BYTES = 64 * MIB  # of all shards that are being written together
DEALT_TOGETHER = 1 << 20  # documents; bounds the memory of dealing

Entry = dict[str, str | int]
"""A shard as the index lists it."""


class Piece(NamedTuple):
    """Where documents wait, and the ordinal in the corpus of the first one of their unit."""

    path: Path
    first: int


def count_shards(
    sizes: np.ndarray, *, min_shards: int, shard_mib: float, itemsize: int
) -> list[int]:
    """Return the number of shards of each bucket, given its (documents, ids), int64 [B, 2].

    There are `min_shards` in all, or more where they would exceed `shard_mib` MiB, and none is
    empty.
    """
    documents = int(sizes[:, 0].sum())
    counts, before = [], 0
    for docs, tokens in sizes.tolist():
        # As many of the least number as its share of the documents; rounded, they add up.
        least = min_shards * (before + docs) // documents - min_shards * before // documents
        before += docs
        size = MEMBER_OVERHEAD * docs + itemsize * tokens
        counts.append(max(least, min(docs, ceil(size / (shard_mib * MIB)))))
    return counts


def write_bucket(
    pieces: Sequence[Piece],
    bucket: int,
    folder: Path,
    *,
    first_shard: int,
    num_shards: int,
    dtype: np.dtype,
    seed: int,
) -> list[Entry]:
    """Write a bucket's documents as `num_shards` tars into `folder`; return their entries."""
    lengths = (read_lengths(piece.path, bucket) for piece in pieces)
    owners = chain.from_iterable(_deal(lengths, num_shards, generator(seed)))
    with ExitStack() as stack:
        shards = [
            _Shard(name, stack.enter_context(written(folder / name)))
            for name in (f"shard-{first_shard + shard:05d}.tar" for shard in range(num_shards))
        ]
        waiting = 0
        for ordinal, ids in _documents(pieces, bucket, dtype):
            waiting += shards[next(owners)].add(ordinal, ids)
            if waiting > WAITING_BYTES:
                for shard in shards:
                    shard.flush()
                waiting = 0
        return [shard.finish() for shard in shards]


def _documents(
    pieces: Iterable[Piece], bucket: int, dtype: np.dtype
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield a bucket's (ordinal, ids) in the order of the corpus."""
    for piece in pieces:
        ordinals, lengths, ids = read_slice(piece.path, bucket, dtype)
        end = 0
        for ordinal, length in zip(ordinals.tolist(), lengths.tolist(), strict=True):
            start, end = end, end + length
            yield piece.first + ordinal, ids[start:end]


def _deal(
    lengths: Iterable[np.ndarray], num_shards: int, rng: np.random.Generator
) -> Iterator[list[int]]:
    """Yield each document's shard, for some documents at a time.

    Of DEALT_TOGETHER documents one after another is drawn at random, and given to the shard that
    has the fewest tokens.
    """
    heap = [(0, shard) for shard in range(num_shards)]
    for together in _regroup(lengths, DEALT_TOGETHER):
        owner = [0] * len(together)
        for document in rng.permutation(len(together)).tolist():
            tokens, shard = heap[0]
            owner[document] = shard
            # Every document weighs something, so that no shard stays empty.
            heapq.heapreplace(heap, (tokens + int(together[document]) + 2, shard))
        yield owner


def _regroup(arrays: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Yield the same items in arrays of `size`; the last is shorter."""
    held: list[np.ndarray] = []
    num_held = 0
    for array in arrays:
        held.append(array)
        num_held += len(array)
        while num_held >= size:
            joined = np.concatenate(held)
            yield joined[:size]
            held, num_held = [joined[size:]], num_held - size
    if num_held:
        yield np.concatenate(held)


class _Shard:
    """A tar that is being written, in appended portions; itself the file of its TarWriter."""

    def __init__(self, name: str, path: Path) -> None:
        self._name = name
        self._path = path
        self._waiting: list[bytes] = []
        self._digest = sha256()
        self._bytes = self._documents = self._tokens = 0
        self._writer = webdataset.TarWriter(self, mtime=0)

    def add(self, ordinal: int, ids: np.ndarray) -> int:
        """Take a document; return how many bytes now wait for `flush` on its account."""
        before = self._bytes
        self._writer.write({"__key__": f"{ordinal:09d}", "npy": ids})
        self._documents += 1
        self._tokens += len(ids)
        return self._bytes - before

    def write(self, data: bytes) -> None:
        """Take bytes of the tar."""
        self._waiting.append(bytes(data))
        self._bytes += len(data)

    def flush(self) -> None:
        """Append what waits to the file."""
        data = b"".join(self._waiting)
        self._waiting = []
        self._digest.update(data)
        with open(self._path, "ab") as file:
            file.write(data)

    def finish(self) -> Entry:
        """Write the end; return the shard's entry of the index."""
        self._writer.close()
        self.flush()
        return {
            "url": self._name,
            "docs": self._documents,
            "tokens": self._tokens,
            "bytes": self._bytes,
            "sha256": self._digest.hexdigest(),
        }
