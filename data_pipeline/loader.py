"""The rows of one rank, in order, made by any number of loader processes.

Row j of the run comes from lane j mod lanes and belongs to rank j mod world. A rank's n loader
processes take its rows in turn, and torch's DataLoader hands them back in turn, so the order is
kept. Where lanes is a multiple of world x n, each lane is read by one process only:

    lanes = 8, world = 2, n = 2     row    0 1 2 3 4 5 6 7 8 9 ...
                                    rank   0 1 0 1 0 1 0 1 0 1
                                    worker 0 0 1 1 0 0 1 1 0 0

A process hands over BLOCK_ROWS of its rows at a time, since each hand-over has a price.
"""

import atexit
import gc
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice, zip_longest
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from data_pipeline.batch import Example
from data_pipeline.lanes import START, Cursor, Lane, Row
from data_pipeline.mixture import Mixture, as_mixture, source_seed
from data_pipeline.reading import Shards

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM)
BLOCK_ROWS = 16
PREFETCHED_BLOCKS = 2  # per loader process; hides the reading of a shard

Transform = Callable[[Row], Example]


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error that a loader process hands over whole, where DataLoader would retell it."""

    error: Exception


_Item = Example | _Failure


class _RankRows(IterableDataset):
    """Rows `first_row`, `first_row` + `stride`, ... of the run; each loader process takes its own.

    Pure function of its arguments: it can be iterated in this process as well.
    """

    def __init__(
        self,
        mixture: Mixture,
        seed: int,
        lanes: int,
        seq_len: int,
        first_row: int,
        stride: int,
        cursors: Mapping[int, Cursor],
        transform: Transform,
    ) -> None:
        self._mixture = mixture
        self._seed = seed
        self._num_lanes = lanes
        self._seq_len = seq_len
        self._first_row = first_row
        self._stride = stride
        self._cursors = dict(cursors)
        self._transform = transform

    def __iter__(self) -> Iterator[list[_Item]]:
        rows = self._rows()
        while block := list(islice(rows, BLOCK_ROWS)):
            yield block

    def _rows(self) -> Iterator[_Item]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        rows = count(self._first_row + worker * self._stride, num_workers * self._stride)
        lanes: dict[int, Lane] = {}
        try:
            for row in islice(rows, self._num_lanes):
                self._lane_of(row, lanes)
            for lane in lanes.values():  # what they read first, all at once
                lane.fetch_ahead()
            rows = count(self._first_row + worker * self._stride, num_workers * self._stride)
            for row in rows:
                yield self._transform(self._lane_of(row, lanes).next_row(self._seq_len))
        except (ValueError, OSError) as error:
            yield _Failure(error)

    def _lane_of(self, row: int, lanes: dict[int, Lane]) -> Lane:
        """Return the lane that gives a row: of as many as there are, one for each source."""
        source, lane = self._mixture.source_of(row), row % self._num_lanes
        name = source * self._num_lanes + lane
        if name not in lanes:
            lanes[name] = Lane(
                self._mixture.sources[source],
                seed=source_seed(self._seed, source),
                lane=lane,
                lanes=self._num_lanes,
                cursor=Cursor(*self._cursors.get(name, START)),
                name=name,
                packing=self._mixture.packing,
            )
        return lanes[name]


class TrainStream(Iterator[Example]):
    """An endless iterator over a rank's examples; `close` ends its loader processes."""

    def __init__(self, rows: _RankRows, workers: int) -> None:
        self._loading: Any = None  # torch's iterator, which owns the loader processes
        self._examples: Iterator[_Item]
        if workers == 0:
            self._examples = rows._rows()
            return
        loader = DataLoader(
            rows,
            batch_size=None,
            num_workers=workers,
            collate_fn=_as_is,
            worker_init_fn=_ignore_signals,
            prefetch_factor=PREFETCHED_BLOCKS,
            multiprocessing_context="fork",
            generator=torch.Generator(),  # its own: the global one is the model's
        )
        # Held back until a loader process ignores them, or one sent at its start would end it.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        # A loader process must not finalise what is this one's: an old engine or a process group
        # may wait there for a thread that a fork does not take along. Nor copy it, to look at it.
        gc.freeze()
        try:
            self._loading = iter(loader)
            self._examples = _in_turn(self._loading, workers)
        finally:
            gc.unfreeze()
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        # At exit multiprocessing waits for processes that, by SIGTERM alone, would never end.
        atexit.register(self.close)

    def __next__(self) -> Example:
        example = next(self._examples)
        if isinstance(example, _Failure):
            self.close()
            raise example.error
        return example

    def close(self) -> None:
        """End the loader processes, by force those that do not answer; nothing comes after."""
        self._examples = iter(())
        loading, self._loading = self._loading, None
        if loading is not None:
            atexit.unregister(self.close)
            loading._shutdown_workers()
            for process in loading._workers:
                process.kill()  # it ignores the SIGTERM that torch has sent by now


def open_stream(
    data: Shards | Mixture,
    *,
    seed: int,
    lanes: int,
    seq_len: int,
    rank: int,
    world: int,
    workers: int,
    first_row: int,
    cursors: Mapping[int, Cursor],
    transform: Transform,
) -> TrainStream:
    """Open the rows j >= `first_row` of the run with j mod `world` == `rank`, in order.

    `cursors` says where each lane goes on; one that is not in it starts at its beginning. Lane l of
    source s has the number s x lanes + l there.
    `transform` makes a row an example, in the loader process. `workers` 0 loads in this process.
    """
    check_split(lanes, world, workers)
    first = first_row + (rank - first_row) % world
    rows = _RankRows(as_mixture(data), seed, lanes, seq_len, first, world, cursors, transform)
    return TrainStream(rows, workers)


def check_split(lanes: int, world: int, workers: int) -> None:
    """Refuse a number of lanes that ranks and loader processes cannot share out."""
    if lanes % (world * max(workers, 1)):
        raise ValueError(
            f"data.lanes={lanes} is not a multiple of {world} ranks x data.workers={workers}: "
            "change data.lanes or data.workers"
        )


def _in_turn(blocks: Iterator[list[_Item]], workers: int) -> Iterator[_Item]:
    """Yield rows in order from the blocks of each process in turn, whose rows lie `workers` apart.

    A failure is the last row of its block, so the rows of others may end before it; it comes then.
    """
    while turn := list(islice(blocks, workers)):
        for row in zip_longest(*turn):
            yield from (item for item in row if item is not None)


def _as_is(example: Any) -> Any:
    return example


def _ignore_signals(worker: int) -> None:
    """Outlive Ctrl-C and SIGTERM: the trainer still needs its rows to save, then closes."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
