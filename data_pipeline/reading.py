"""How shards are read: from where, through which cache, and what is done about damage."""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Literal, NamedTuple, Protocol, cast

import numpy as np

from data_pipeline.cache import Cache
from data_pipeline.sources import PATIENT, PIPE, Patience, SourceError, Stat, chunks, is_remote
from data_pipeline.specials import Specials

OnError = Literal["stop", "skip_shard", "skip_sample"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What was left out of a shard, and why. Each time it is read, the same."""

    shard: str
    """Its name, without credentials."""
    samples: int
    """How many of its samples; 0: the whole shard."""
    reason: str
    """The first one, in a line that names the shard."""


class Documents(NamedTuple):
    """What a shard gave."""

    ids: Sequence[np.ndarray]
    """Token ids of each document, without special ones, in file order."""
    fault: Fault | None = None


class Shards(Protocol):
    """A source of training: shards in a fixed order, wherever they are and whatever is in them."""

    @property
    def name(self) -> str:
        """Where they are, for messages."""

    @property
    def sha256(self) -> str:
        """Fingerprint: equal ones hold equal documents."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Each shard's size, for an even share: in tokens, or else in bytes."""

    @property
    def epoch_tokens(self) -> int | None:
        """Tokens in all, wrapped documents counted, where they are known."""

    @property
    def specials(self) -> Specials:
        """The special ids of their tokenizer."""

    def __hash__(self) -> int:
        """Shards are frozen."""

    def read(self, shard: int) -> Documents:
        """Return a shard's documents; raise what `data.on_error` says to."""

    def fetch_ahead(self, shard: int) -> None:
        """Begin to bring a shard near."""


@dataclass(frozen=True)
class Reading:
    """The settings by which shards are read."""

    on_error: OnError = "stop"
    patience: Patience = PATIENT
    cache: Cache | None = None
    """For what is remote; without one it comes anew each time."""

    def content(self, url: str, stat: Stat, check: Callable[[bytes], str | None]) -> bytes:
        """Return all bytes of a source, which `check` finds nothing wrong with.

        Raises:
            SourceError: With the name and what is wrong.
        """
        if is_remote(url) and self.cache is not None:
            return self.cache.read(url, stat, check)
        content = b"".join(chunks(url, self.patience))
        if problem := check(content):
            raise SourceError(f"{url}: {problem}")
        return content

    @contextmanager
    def stream(self, url: str, stat: Stat) -> Iterator[BinaryIO]:
        """Open a source to be read from its start."""
        if not is_remote(url):
            with open(url, "rb") as file:
                yield file
        elif self.cache is not None and not url.startswith(PIPE):
            with self.cache.open(url, stat) as file:
                yield file
        else:
            with closing(chunks(url, self.patience, stat.size)) as parts:
                yield cast(BinaryIO, io.BufferedReader(_Stream(parts), 1 << 20))

    def fetch_ahead(self, url: str, stat: Stat) -> None:
        """Begin to bring a source into the cache."""
        if self.cache is not None and is_remote(url) and not url.startswith(PIPE):
            self.cache.fetch_ahead(url, stat)

    def forget(self, url: str, stat: Stat) -> bool:
        """Remove a damaged source from the cache; whether it may come whole another time."""
        if self.cache is None or not is_remote(url) or url.startswith(PIPE):
            return False
        self.cache.forget(url, stat)
        return True

    def skipped(self, shard: str, error: Exception) -> Documents:
        """Return no documents and the reason, or raise it where damage must stop the run."""
        if self.on_error == "stop":
            raise error
        return Documents((), Fault(shard, 0, str(error)))


class _Stream(io.RawIOBase):
    """Chunks as a stream."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = parts
        self._part = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._part:
            part = next(self._parts, None)
            if part is None:
                return 0
            self._part = memoryview(part)
        count = min(len(buffer), len(self._part))
        buffer[:count] = self._part[:count]
        self._part = self._part[count:]
        return count
