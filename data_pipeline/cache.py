"""A bounded folder of this node for what comes over a network, shared by all its processes.

    HASH            a source, whole
    HASH.partial    one that is being fetched, locked by whoever does it

A file gets its name when it is whole. The lock goes with the process that holds it, so after a kill
the next to come starts that file anew. What was used longest ago makes room for what comes.
"""

import fcntl
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from data_pipeline.sources import PATIENT, Patience, SourceError, Stat, chunks, redacted

PARTIAL = ".partial"
WAIT_S = 0.05
FETCHERS = 4  # threads of a process that fetch ahead
GIB = 2**30


@dataclass(frozen=True)
class Cache:
    """Fetches sources once a node, and keeps at most `limit` bytes of them."""

    folder: Path
    limit: int
    patience: Patience = PATIENT
    _ahead: "dict[int, _Ahead]" = field(default_factory=dict, repr=False, compare=False)

    def read(self, url: str, stat: Stat, check: Callable[[bytes], str | None]) -> bytes:
        """Return a source's content, which `check` finds nothing wrong with.

        Raises:
            SourceError: With what is wrong, if that is so when it has come a second time.
        """
        for _ in range(2):
            with self.open(url, stat) as file:
                content = file.read()
            if (problem := check(content)) is None:
                return content
            self.forget(url, stat)
        raise SourceError(f"{redacted(url)}: {problem}")

    def open(self, url: str, stat: Stat) -> BinaryIO:
        """Open a source that is fetched first where it is not there."""
        while True:
            self.fetch(url, stat)
            with suppress(FileNotFoundError):  # it made room for another at this very moment
                return open(self._path(url, stat), "rb")

    def forget(self, url: str, stat: Stat) -> None:
        """Remove a source that is damaged: by the way, or by the disk since."""
        self._path(url, stat).unlink(missing_ok=True)

    def fetch_ahead(self, url: str, stat: Stat) -> None:
        """Have a thread fetch a source; an error shows when it is read."""
        process = os.getpid()
        if process not in self._ahead:  # threads do not outlive a fork
            self._ahead.clear()
            self._ahead[process] = _Ahead(self)
        self._ahead[process].ask(url, stat)

    def fetch(self, url: str, stat: Stat) -> None:
        """See to it that a source is in the folder, whole."""
        path = self._path(url, stat)
        self._make_folder()
        while not path.exists():
            with self._partial(path) as partial:
                if partial is None:
                    continue
                if path.exists():  # another process has just brought it
                    break
                self._fill(partial, url, stat)
                os.replace(path.with_name(path.name + PARTIAL), path)
        with suppress(FileNotFoundError):
            os.utime(path)  # used now

    def _make_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.folder.stat().st_uid != os.getuid():
            raise SourceError(f"data.cache_dir: {self.folder} is another user's; name your own")

    def _path(self, url: str, stat: Stat) -> Path:
        key = sha256(f"{url}\0{stat.size}\0{stat.version}".encode()).hexdigest()[:40]
        return self.folder / key

    @contextmanager
    def _partial(self, path: Path) -> Iterator[int | None]:
        """Hold the lock of a file to be; None where someone had it and is done or dead."""
        name = path.with_name(path.name + PARTIAL)
        file = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is(name, file):
                yield None
                return
            try:
                yield file
            finally:
                if _is(name, file):
                    name.unlink()
        finally:
            os.close(file)

    def _fill(self, partial: int, url: str, stat: Stat) -> None:
        """Write a source into a file that is locked, its place reserved before."""
        os.ftruncate(partial, 0)
        stream: Iterable[bytes] = chunks(url, self.patience, stat.size)
        size = stat.size
        if size is None:  # a server that does not tell: it must come whole before it has a place
            stream = list(stream)
            size = sum(map(len, stream))
        self._make_room(partial, size, url)
        with open(partial, "wb", closefd=False) as file:
            file.writelines(stream)
        os.fsync(partial)

    def _make_room(self, partial: int, size: int, url: str) -> None:
        """Let the oldest files go until `size` bytes of this one fit, and take their place.

        What others are fetching stays, and is waited for.
        """
        if size > self.limit:
            raise SourceError(
                f"{redacted(url)}: {size} bytes do not fit data.cache_gib="
                f"{self.limit / GIB:.3g}; raise it"
            )
        while not self._has_made_room(partial, size):
            time.sleep(WAIT_S)

    def _has_made_room(self, partial: int, size: int) -> bool:
        mine = os.fstat(partial).st_ino
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            used, files = 0, []
            for entry in os.scandir(self.folder):
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    if status.st_ino == mine:
                        continue
                    used += status.st_size
                    if entry.name.endswith(PARTIAL):
                        used -= _forget_if_dead(entry.path)
                    else:
                        files.append((status.st_mtime_ns, status.st_size, entry.path))
            for _, freed, path in sorted(files):
                if used + size <= self.limit:
                    break
                with suppress(FileNotFoundError):
                    os.unlink(path)
                used -= freed
            has_room = used + size <= self.limit
            if has_room:
                os.ftruncate(partial, size)  # counts from now on
            return has_room
        finally:
            os.close(lock)


def _is(path: Path, file: int) -> bool:
    """Whether `path` is the name of an open file."""
    with suppress(FileNotFoundError):
        return os.stat(path).st_ino == os.fstat(file).st_ino
    return False


def _forget_if_dead(path: str) -> int:
    """Remove what a killed process has left half-fetched; return how many bytes that were."""
    file = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = os.fstat(file).st_size
        os.unlink(path)
        return size
    except (BlockingIOError, FileNotFoundError):
        return 0
    finally:
        os.close(file)


class _Ahead:
    """Threads that fetch what is asked for, in order; they end with the process."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._wanted: queue.SimpleQueue[tuple[str, Stat]] = queue.SimpleQueue()
        for _ in range(FETCHERS):
            threading.Thread(target=self._work, daemon=True).start()

    def ask(self, url: str, stat: Stat) -> None:
        self._wanted.put((url, stat))

    def _work(self) -> None:
        while True:
            with suppress(ValueError, OSError):
                self._cache.fetch(*self._wanted.get())
