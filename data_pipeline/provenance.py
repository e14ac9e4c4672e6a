"""Which documents a stretch of a lane is made of: names the text behind a step that went wrong."""

from collections.abc import Iterator
from typing import NamedTuple

from data_pipeline.archive import read_members
from data_pipeline.index import ShardIndex
from data_pipeline.lanes import Cursor, deal
from data_pipeline.seeding import generator


class Source(NamedTuple):
    """A document in a shard."""

    shard: str
    """The shard's url, as the index has it."""
    key: str
    """The member's name in it, without `.npy`."""


def documents_between(
    index: ShardIndex, *, seed: int, lane: int, lanes: int, start: Cursor, end: Cursor
) -> Iterator[Source]:
    """Yield the documents that the tokens from `start` to `end` of a lane come from, in order.

    Reads their shards. Raises ValueError or OSError where one can't be read.
    """
    epoch, ordinal, document, _ = start
    while (epoch, ordinal) <= end[:2]:
        shards = deal(index, seed, epoch, lanes)[lane]
        shard = shards[ordinal]
        path = index.path(shard)
        keys = [key for key, _ in read_members(path.read_bytes(), index.dtype, str(path))]
        order = generator(seed, epoch, shard).permutation(len(keys)).tolist()
        is_last = (epoch, ordinal) == end[:2]
        stop = end.document + (end.offset > 0) if is_last else len(order)
        for place in order[document:stop]:
            yield Source(index.shards[shard].url, f"{keys[place]:09d}")
        epoch, ordinal = (epoch, ordinal + 1) if ordinal + 1 < len(shards) else (epoch + 1, 0)
        document = 0
