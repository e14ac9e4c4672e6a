"""Which documents a stretch of a lane is made of: names the text behind a step that went wrong."""

from collections.abc import Iterator
from typing import NamedTuple

from data_pipeline.index import ShardIndex, read_arrays
from data_pipeline.lanes import Cursor, Lane
from data_pipeline.mixture import Mixture, source_seed
from data_pipeline.reading import Shards
from data_pipeline.sources import redacted


class Source(NamedTuple):
    """A document in a shard."""

    shard: str
    """Where the shard is, without credentials."""
    key: str
    """The member's name in it; in tars without an index, `#` and its ordinal among documents."""


def documents_between(
    mixture: Mixture, *, seed: int, lane: int, lanes: int, start: Cursor, end: Cursor
) -> Iterator[Source]:
    """Yield the documents that the tokens from `start` to `end` of a lane come from, in order.

    Reads their shards. Raises ValueError or OSError where one can't be read.

    Args:
        mixture: What is trained on.
        seed: The run's.
        lane: Its name: those of source k count from k x `lanes`.
        lanes: Lanes of each source.
        start: Where the stretch begins.
        end: Where it ends; that token is not in it.
    """
    source, number = divmod(lane, lanes)
    shards = mixture.sources[source]
    walk = Lane(
        shards, seed=source_seed(seed, source), lane=number, lanes=lanes, cursor=start, name=lane
    )
    keys: dict[int, list[str]] = {}
    for shard, document in walk.documents_until(end):
        if shard not in keys:
            keys = {shard: _keys(shards, shard)}
        yield Source(_url(shards, shard), keys[shard][document] if keys[shard] else f"#{document}")


def _url(shards: Shards, shard: int) -> str:
    url = shards.url(shard) if isinstance(shards, ShardIndex) else shards.urls[shard]  # type: ignore[attr-defined]
    return redacted(url)


def _keys(shards: Shards, shard: int) -> list[str]:
    """Return the names of an indexed shard's documents, in file order; none of another's."""
    if not isinstance(shards, ShardIndex):
        return []
    return [f"{key:09d}" for key, _ in read_arrays(shards.content(shard), shards.dtype, "")]
