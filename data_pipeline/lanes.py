"""Lanes: endless streams of packed rows whose order depends on the seed and the shards alone.

    epoch e     shards permuted by (seed, e), dealt to lanes by size        deal()
    shard s     documents permuted by (seed, e, s)
                where shards are fewer than lanes, cut into parts, dealt like shards
    document    [CLS] ids [SEP]
    row         exactly seq_len tokens; a document that does not fit goes on in the next row,
                however little of it is left

    lane 0:  |doc a|doc b|doc |   |c|doc d|doc e   |   |doc e    ...
              ----- row 0 ----     ----- row 1 -----    - row 2 -

That is packing `packed`: rows are always full. `padded` is the paper's: a row is one piece of one
document, and [PAD] after it, a piece of its own that no other token sees and nothing asks for.

    lane 0:  |doc a|pad  |   |doc b|pad|   |doc c    |   |c|pad    |    ...

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

from data_pipeline.config import Packing
from data_pipeline.reading import Documents, Fault, Shards
from data_pipeline.seeding import generator
from data_pipeline.specials import Specials

EVAL_LANE = -1


class Cursor(NamedTuple):
    """The place of a lane's next token."""

    epoch: int
    shard: int
    """Ordinal in the lane's list of shards (or parts of them) of that epoch."""
    document: int
    """Ordinal in the permuted order of that epoch."""
    offset: int
    """Token within the wrapped document."""


START = Cursor(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Row:
    """One packed row of a lane."""

    ids: np.ndarray
    """int64 [seq_len]."""
    lengths: tuple[int, ...]
    """Tokens of each document's piece, in order; padding is the last one."""
    lane: int
    start: Cursor
    """Place of the first token: the key of the row's masks."""
    cursor: Cursor
    """Place after the last token: what a checkpoint keeps."""
    faults: tuple[Fault, ...] = ()
    """What was left out since the lane's last row."""
    padding: int = 0
    """Tokens at the end that are [PAD]."""


@lru_cache(maxsize=8)
def deal(shards: Shards, seed: int, epoch: int, lanes: int) -> tuple[tuple[int, ...], ...]:
    """Return each lane's shards of an epoch, in reading order.

    Shards are drawn by (seed, epoch); each goes to the lane that has the fewest tokens so far.
    Where they are fewer than the lanes, each is cut into `num_parts`: item i is then part
    i mod num_parts of shard i // num_parts.
    """
    parts = num_parts(shards, lanes)
    sizes = shards.sizes
    dealt: list[list[int]] = [[] for _ in range(lanes)]
    heap = [(0, lane) for lane in range(lanes)]
    for item in generator(seed, epoch).permutation(parts * len(sizes)).tolist():
        size, lane = heap[0]
        dealt[lane].append(item)
        heapq.heapreplace(heap, (size + sizes[item // parts], lane))
    return tuple(map(tuple, dealt))


def num_parts(shards: Shards, lanes: int) -> int:
    """Return into how many parts each shard is cut, so that every lane has something to read."""
    return -(-lanes // len(shards.sizes))


class Lane:
    """One endless stream of rows, resumable at any cursor.

    Holds the documents of one shard, and near its end reads the next one in the background.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        seed: int,
        lane: int,
        lanes: int,
        cursor: Cursor = START,
        name: int | None = None,
        packing: Packing = "packed",
    ) -> None:
        """Open lane number `lane` of `lanes`; its rows say that they are of lane `name`."""
        self.cursor = cursor
        self._packing = packing
        self._name = lane if name is None else name
        self._shards = shards
        self._parts = num_parts(shards, lanes)
        self._seed = seed
        self._lane = lane
        self._lanes = lanes
        self._visit = (-1, -1)  # the epoch and ordinal of what is open
        self._shard = self._next_shard = -1
        self._documents = Documents(())
        self._order = np.zeros(0, dtype=np.int64)
        self._empty: set[int] = set()  # shards that had no document when last read
        self._faults: list[Fault] = []
        self._place = (-1, -1, -1)  # the document that `_wrapped` holds
        self._wrapped = np.zeros(0, dtype=np.int64)
        self._ahead: _ReadAhead | None = None

    def fetch_ahead(self) -> None:
        """Begin to bring near what the first row needs."""
        self._shards.fetch_ahead(self._dealt(self.cursor.epoch)[self.cursor.shard] // self._parts)

    def next_row(self, seq_len: int, *, last_epoch: int | None = None) -> Row:
        """Return the next `seq_len` tokens as a row, or what is left until `last_epoch` ends.

        Raises:
            ValueError: If a shard is damaged and not to be skipped, or none holds a document.
        """
        ids = np.empty(seq_len, dtype=np.int64)
        start, lengths, filled = self.cursor, [], 0
        while filled < seq_len and self._find_document(last_epoch):
            if not filled:
                start = self.cursor
            wrapped, offset = self._document(), self.cursor.offset
            length = min(seq_len - filled, len(wrapped) - offset)
            ids[filled : filled + length] = wrapped[offset : offset + length]
            filled += length
            lengths.append(length)
            self._advance(offset + length, len(wrapped))
            if self._packing == "padded":
                break
        padding = seq_len - filled if self._packing == "padded" and filled else 0
        if padding:
            ids[filled:] = self._shards.specials.pad
            lengths.append(padding)
        ids = ids[: filled + padding]
        faults, self._faults = tuple(self._faults), []
        return Row(ids, tuple(lengths), self._name, start, self.cursor, faults, padding)

    def documents_until(self, end: Cursor) -> Iterator[tuple[int, int]]:
        """Yield the shard, and the ordinal in it, of each document from the cursor to `end`."""
        while self.cursor < end and self._find_document(None) and self.cursor < end:
            yield self._shard, int(self._order[self.cursor.document])
            self._advance(1, 1)

    def _find_document(self, last_epoch: int | None) -> bool:
        """Open what the cursor points to, or the next that has a document; False at the end."""
        while last_epoch is None or self.cursor.epoch <= last_epoch:
            epoch, ordinal, document, _ = self.cursor
            if (epoch, ordinal) != self._visit:
                self._open(epoch, ordinal)
            if document < len(self._order):
                return True
            self.cursor = Cursor(*self._after(epoch, ordinal), 0, 0)
        return False

    def _document(self) -> np.ndarray:
        """Return the wrapped document at the cursor."""
        place = self.cursor[:3]
        if place != self._place:
            document = place[2]
            self._wrapped = _wrap(self._documents.ids[self._order[document]], self._shards.specials)
            self._place = place
            is_near_end = 4 * (document + 1) > 3 * len(self._order)
            if is_near_end and self._ahead is None and self._next_shard != self._shard:
                self._ahead = _ReadAhead(self._shards, self._next_shard)
        return self._wrapped

    def _advance(self, offset: int, length: int) -> None:
        """Move the cursor to `offset` of the document, or to the next document at its end."""
        epoch, shard, document, _ = self.cursor
        if offset == length:
            document, offset = document + 1, 0
            if document == len(self._order):
                epoch, shard, document = *self._after(epoch, shard), 0
        self.cursor = Cursor(epoch, shard, document, offset)

    def _open(self, epoch: int, ordinal: int) -> None:
        """Hold the documents of a shard, or of a part of it, in their order of that epoch."""
        shard, part = divmod(self._dealt(epoch)[ordinal], self._parts)
        if shard != self._shard:
            ahead, self._ahead = self._ahead, None
            self._documents = Documents(())  # let these go before more come
            self._documents = ahead.result() if ahead else self._shards.read(shard)
            self._note(shard)
        if self._documents.fault:
            self._faults.append(self._documents.fault)
        order = generator(self._seed, epoch, shard).permutation(len(self._documents.ids))
        self._order = order[part :: self._parts]
        next_epoch, next_ordinal = self._after(epoch, ordinal)
        self._shard, self._next_shard = shard, self._dealt(next_epoch)[next_ordinal] // self._parts
        self._visit = epoch, ordinal
        if self._next_shard != shard:
            self._shards.fetch_ahead(self._next_shard)

    def _note(self, shard: int) -> None:
        """Remember whether a shard is empty; where all are, there is nothing to go on with."""
        if len(self._documents.ids):
            self._empty.discard(shard)
            return
        self._empty.add(shard)
        if len(self._empty) == len(self._shards.sizes):
            fault = self._documents.fault
            raise ValueError(
                f"{self._shards.name} holds no document{f': {fault.reason}' if fault else ''}"
            )

    def _after(self, epoch: int, ordinal: int) -> tuple[int, int]:
        """Return the epoch and ordinal of the lane's next shard."""
        is_last = ordinal + 1 == len(self._dealt(epoch))
        return (epoch + 1, 0) if is_last else (epoch, ordinal + 1)

    def _dealt(self, epoch: int) -> tuple[int, ...]:
        return deal(self._shards, self._seed, epoch, self._lanes)[self._lane]


def _wrap(ids: np.ndarray, specials: Specials) -> np.ndarray:
    """Return [CLS] ids [SEP], int64."""
    wrapped = np.empty(len(ids) + 2, dtype=np.int64)
    wrapped[0], wrapped[1:-1], wrapped[-1] = specials.cls, ids, specials.sep
    return wrapped


class _ReadAhead:
    """A shard being read by a thread; `result` waits for it, or raises its error."""

    def __init__(self, shards: Shards, shard: int) -> None:
        self._documents = Documents(())
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._read, args=(shards, shard), daemon=True)
        self._thread.start()

    def _read(self, shards: Shards, shard: int) -> None:
        try:
            self._documents = shards.read(shard)
        except Exception as error:
            self._error = error

    def result(self) -> Documents:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._documents


def eval_rows(shards: Shards, *, seq_len: int, packing: Packing = "packed") -> Iterator[Row]:
    """Yield every held-out document once, in one fixed order; the last row may be short.

    The rows are those of a single lane's first epoch, so their `start` can key masks likewise.
    """
    lane = Lane(shards, seed=0, lane=0, lanes=1, packing=packing)
    while len((row := lane.next_row(seq_len, last_epoch=0)).ids):
        yield replace(row, lane=EVAL_LANE)
