"""Lanes: endless streams of packed rows whose order depends on the seed and the shards alone.

    epoch e     shards permuted by (seed, e), dealt to lanes by size        deal()
    shard s     documents permuted by (seed, e, s)
    document    [CLS] ids [SEP]
    row         exactly seq_len tokens; a document that does not fit goes on in the next row

    lane 0:  |doc a|doc b|doc |   |c|doc d|doc e   |   |doc e    ...
              ----- row 0 ----     ----- row 1 -----    - row 2 -

A lane's cursor is the next token's place. It does not depend on the row length, so that may
change at any row: nothing is lost or repeated.
"""

import heapq
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from data_pipeline.index import ShardIndex, read_shard
from data_pipeline.seeding import generator
from data_pipeline.specials import Specials

NUM_WRAPPED = 2  # [CLS] and [SEP]
EVAL_LANE = -1


class Cursor(NamedTuple):
    """The place of a lane's next token."""

    epoch: int
    shard: int
    """Ordinal in the lane's list of shards of that epoch."""
    document: int
    """Ordinal in the shard's permuted order of that epoch."""
    offset: int
    """Token within the wrapped document."""


START = Cursor(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Row:
    """One packed row of a lane."""

    ids: np.ndarray
    """int64 [seq_len]."""
    lengths: tuple[int, ...]
    """Tokens of each document's piece, in order."""
    lane: int
    start: Cursor
    """Place of the first token: the key of the row's masks."""
    cursor: Cursor
    """Place after the last token: what a checkpoint keeps."""


@lru_cache(maxsize=8)
def deal(index: ShardIndex, seed: int, epoch: int, lanes: int) -> tuple[tuple[int, ...], ...]:
    """Return each lane's shards of an epoch, in reading order.

    Shards are drawn by (seed, epoch); each goes to the lane that has the fewest tokens so far.
    """
    if len(index.shards) < lanes:
        raise ValueError(
            f"{index.folder} has {len(index.shards)} shards, fewer than data.lanes={lanes}: lower "
            "data.lanes, or write the shards again"
        )
    dealt: list[list[int]] = [[] for _ in range(lanes)]
    heap = [(0, lane) for lane in range(lanes)]
    for shard in generator(seed, epoch).permutation(len(index.shards)).tolist():
        tokens, lane = heap[0]
        dealt[lane].append(shard)
        info = index.shards[shard]
        heapq.heapreplace(heap, (tokens + info.tokens + NUM_WRAPPED * info.docs, lane))
    return tuple(map(tuple, dealt))


class Lane:
    """One endless stream of rows, resumable at any cursor.

    Holds the documents of one shard, and near its end reads the next one in the background.
    """

    def __init__(
        self, index: ShardIndex, *, seed: int, lane: int, lanes: int, cursor: Cursor = START
    ) -> None:
        self.cursor = cursor
        self._index = index
        self._seed = seed
        self._lane = lane
        self._lanes = lanes
        self._visit = (-1, -1)  # the epoch and ordinal of the shard that is open
        self._shard = self._next_shard = -1
        self._documents: list[np.ndarray] = []
        self._order = np.zeros(0, dtype=np.int64)
        self._place = (-1, -1, -1)  # the document that `_wrapped` holds
        self._wrapped = np.zeros(0, dtype=np.int64)
        self._ahead: _ReadAhead | None = None

    def next_row(self, seq_len: int) -> Row:
        """Return the next `seq_len` tokens as a row."""
        start = self.cursor
        ids = np.empty(seq_len, dtype=np.int64)
        lengths = []
        filled = 0
        while filled < seq_len:
            wrapped, offset = self._document(), self.cursor.offset
            length = min(seq_len - filled, len(wrapped) - offset)
            ids[filled : filled + length] = wrapped[offset : offset + length]
            filled += length
            lengths.append(length)
            self._advance(offset + length, len(wrapped))
        return Row(ids, tuple(lengths), self._lane, start, self.cursor)

    def _document(self) -> np.ndarray:
        """Return the wrapped document at the cursor."""
        place = self.cursor[:3]
        if place != self._place:
            epoch, shard, document = place
            if (epoch, shard) != self._visit:
                self._open(epoch, shard)
            self._wrapped = _wrap(self._documents[self._order[document]], self._index.specials)
            self._place = place
            is_near_end = 4 * (document + 1) > 3 * len(self._documents)
            if is_near_end and self._ahead is None and self._next_shard != self._shard:
                self._ahead = _ReadAhead(self._index, self._next_shard)
        return self._wrapped

    def _advance(self, offset: int, length: int) -> None:
        """Move the cursor to `offset` of the document, or to the next document at its end."""
        epoch, shard, document, _ = self.cursor
        if offset == length:
            document, offset = document + 1, 0
            if document == len(self._documents):
                epoch, shard, document = *self._after(epoch, shard), 0
        self.cursor = Cursor(epoch, shard, document, offset)

    def _open(self, epoch: int, ordinal: int) -> None:
        """Hold the documents of a shard in their order of that epoch."""
        shard = self._shards(epoch)[ordinal]
        if shard != self._shard:
            ahead, self._ahead = self._ahead, None
            self._documents = []  # let these go before more come
            self._documents = ahead.result() if ahead else read_shard(self._index, shard)
        self._order = generator(self._seed, epoch, shard).permutation(len(self._documents))
        next_epoch, next_ordinal = self._after(epoch, ordinal)
        self._shard, self._next_shard = shard, self._shards(next_epoch)[next_ordinal]
        self._visit = epoch, ordinal

    def _after(self, epoch: int, ordinal: int) -> tuple[int, int]:
        """Return the epoch and ordinal of the lane's next shard."""
        is_last = ordinal + 1 == len(self._shards(epoch))
        return (epoch + 1, 0) if is_last else (epoch, ordinal + 1)

    def _shards(self, epoch: int) -> tuple[int, ...]:
        return deal(self._index, self._seed, epoch, self._lanes)[self._lane]


def _wrap(ids: np.ndarray, specials: Specials) -> np.ndarray:
    """Return [CLS] ids [SEP], int64."""
    wrapped = np.empty(len(ids) + NUM_WRAPPED, dtype=np.int64)
    wrapped[0], wrapped[1:-1], wrapped[-1] = specials.cls, ids, specials.sep
    return wrapped


class _ReadAhead:
    """A shard being read by a thread; `result` waits for it, or raises its error."""

    def __init__(self, index: ShardIndex, shard: int) -> None:
        self._documents: list[np.ndarray] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._read, args=(index, shard), daemon=True)
        self._thread.start()

    def _read(self, index: ShardIndex, shard: int) -> None:
        try:
            self._documents = read_shard(index, shard)
        except Exception as error:
            self._error = error

    def result(self) -> list[np.ndarray]:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._documents


def eval_rows(index: ShardIndex, *, seq_len: int) -> Iterator[Row]:
    """Yield every held-out document once, packed in one fixed order; the last row may be short.

    The rows are those of a single lane's first epoch, so their `start` can key masks likewise.
    """
    lane = Lane(index, seed=0, lane=0, lanes=1)
    remaining = index.tokens + NUM_WRAPPED * index.docs
    while remaining:
        row = lane.next_row(min(seq_len, remaining))
        remaining -= len(row.ids)
        yield replace(row, lane=EVAL_LANE)
