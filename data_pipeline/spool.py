"""Pieces of a tokenized corpus on disk, parted into buckets: the first half of a shuffle.

A document's bucket is drawn at random. A piece keeps the documents of a bucket together, so the
second half of the shuffle reads one run of bytes a piece and bucket. A piece's file:

    int64 [1]       number of buckets B
    int64 [B+1, 2]  documents and ids before each bucket
    int64 [D, 2]    of each document: its ordinal, and how many ids it has
    ids
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple
from uuid import uuid4

import numpy as np

from data_pipeline.seeding import generator

PIECE_IDS = 1 << 24  # bounds the memory of whoever writes or reads a piece
INTEGER = np.dtype("<i8")


class Slice(NamedTuple):
    """The documents of a piece that are in one bucket, in order."""

    ordinals: np.ndarray
    """int64 [D], counted from the unit's first document."""
    lengths: np.ndarray
    """int64 [D]."""
    ids: np.ndarray
    """End to end."""


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yield where to write a file that appears at `path` at the end, whole or not at all.

    Whoever is killed meanwhile leaves a `.partial` file, which nobody reads.
    """
    partial = path.with_name(f"{path.name}.{uuid4().hex[:12]}.partial")
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def gather(chunks: Iterable[tuple[np.ndarray, np.ndarray]]) -> Iterator[Slice]:
    """Join (ids, lengths) of consecutive documents to pieces of about PIECE_IDS ids."""
    ids: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    first = size = 0
    for some_ids, some_lengths in chunks:
        ids.append(some_ids)
        lengths.append(some_lengths)
        # Every document weighs something, so that those without ids are bounded too.
        size += len(some_ids) + 8 * len(some_lengths)
        if size >= PIECE_IDS:
            piece = _join(ids, lengths, first)
            yield piece
            ids, lengths, first, size = [], [], first + len(piece.lengths), 0
    if ids:
        yield _join(ids, lengths, first)


def _join(ids: list[np.ndarray], lengths: list[np.ndarray], first: int) -> Slice:
    counts = np.concatenate(lengths)
    return Slice(first + np.arange(len(counts)), counts, np.concatenate(ids))


def write_piece(path: Path, piece: Slice, buckets: int, key: tuple[int, ...]) -> None:
    """Write a piece with its documents drawn into `buckets` by the random numbers of `key`."""
    bucket = generator(*key).integers(buckets, size=len(piece.lengths))
    order = np.argsort(bucket, kind="stable")
    ends = np.cumsum(piece.lengths)
    table = np.zeros((buckets + 1, 2), dtype=INTEGER)
    table[1:, 0] = np.bincount(bucket, minlength=buckets)
    table[1:, 1] = np.bincount(bucket, weights=piece.lengths, minlength=buckets)
    with written(path) as partial, open(partial, "wb") as file:
        np.array([buckets], dtype=INTEGER).tofile(file)
        table.cumsum(axis=0).astype(INTEGER).tofile(file)
        np.stack([piece.ordinals[order], piece.lengths[order]], axis=1).astype(INTEGER).tofile(file)
        if buckets == 1:
            piece.ids.tofile(file)
            return
        for document in order.tolist():
            end = int(ends[document])
            file.write(piece.ids[end - int(piece.lengths[document]) : end].data)


def bucket_sizes(path: Path) -> np.ndarray:
    """Return a piece's documents and ids by bucket, int64 [B, 2]."""
    with open(path, "rb") as file:
        return np.diff(_table(file), axis=0)


def read_slice(path: Path, bucket: int, dtype: np.dtype) -> Slice:
    """Return what a piece holds of a bucket."""
    with open(path, "rb") as file:
        table = _table(file)
        (first, before), (last, after) = table[bucket].tolist(), table[bucket + 1].tolist()
        documents = file.tell()
        file.seek(documents + 2 * first * INTEGER.itemsize)
        pairs = np.fromfile(file, INTEGER, 2 * (last - first)).reshape(-1, 2)
        start_of_ids = documents + 2 * int(table[-1, 0]) * INTEGER.itemsize
        file.seek(start_of_ids + before * dtype.itemsize)
        return Slice(pairs[:, 0], pairs[:, 1], np.fromfile(file, dtype, after - before))


def read_lengths(path: Path, bucket: int) -> np.ndarray:
    """Return how many ids each document of a piece's bucket has, int64 [D]."""
    with open(path, "rb") as file:
        table = _table(file)
        first, last = table[bucket : bucket + 2, 0].tolist()
        file.seek(2 * first * INTEGER.itemsize, os.SEEK_CUR)
        return np.fromfile(file, INTEGER, 2 * (last - first)).reshape(-1, 2)[:, 1]


def _table(file: BinaryIO) -> np.ndarray:
    """Read the head of a piece."""
    (buckets,) = np.fromfile(file, INTEGER, 1).tolist()
    return np.fromfile(file, INTEGER, 2 * (buckets + 1)).reshape(-1, 2)
