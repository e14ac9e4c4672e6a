"""The folder in which shards are built, `FOLDER.building`: what lies there, and who may change it.

    UNIT.json            a unit is tokenized: its counts, how many pieces it has
    UNIT.N.piece         one of them
    PLAN.bucket-N.json   a bucket is written: the entries of its shards
    PLAN.shards/         the shards, until they are published
    lock

UNIT and PLAN are hashes of all that these are made from.
"""

import fcntl
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from data_pipeline.spool import written


class Workplace:
    """Names the files of a building, and keeps them."""

    def __init__(self, folder: Path, units: Sequence[str], plan: str) -> None:
        """Prepare for the shards of `folder`, whose units and plan have these hashes."""
        self.path = folder.with_name(f"{folder.name}.building")
        self._units = units
        self._plan = plan

    @property
    def shards(self) -> Path:
        """Where the shards are until they are published."""
        return self.path / f"{self._plan}.shards"

    @property
    def earlier(self) -> Path:
        """Where the folder goes that they take the place of."""
        return self.path / f"{self._plan}.earlier"

    def unit(self, number: int) -> Path:
        """Where the facts of a tokenized unit are."""
        return self.path / f"{self._units[number]}.json"

    def piece(self, number: int, piece: int) -> Path:
        """Where a piece of a unit is."""
        return self.path / f"{self._units[number]}.{piece}.piece"

    def bucket(self, bucket: int) -> Path:
        """Where the entries of a bucket's shards are."""
        return self.path / f"{self._plan}.bucket-{bucket}.json"

    @contextmanager
    def locked(self, *, shared: bool, keeps_on_refusal: bool) -> Iterator[None]:
        """Make the place and hold it: with others who share it, or alone.

        Where bad input ends the work, the place is cleared, unless it `keeps_on_refusal`; and where
        nothing was done there, no trace of it is left.

        Raises:
            ValueError: If someone else is at work.
        """
        new = [parent for parent in self.path.parents if not parent.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / "lock", "a") as lock:
            try:
                fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{self.path}: another process is at work there") from None
            except OSError:
                pass  # a file system without locks; what is done twice there comes out the same
            try:
                yield
            except ValueError:
                if not shared and not keeps_on_refusal:
                    self.clear()
                raise
            finally:
                if not shared:
                    self._tidy(new)

    def clear(self) -> None:
        """Remove all that is kept for going on."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _tidy(self, new: list[Path]) -> None:
        if self.path.exists() and [path.name for path in self.path.iterdir()] == ["lock"]:
            self.clear()
        with suppress(OSError):  # what is not empty, or someone else's by now, stays
            for folder in new:
                folder.rmdir()


def write_json(path: Path, value: object) -> None:
    """Write a file that appears whole or not at all."""
    with written(path) as partial:
        partial.write_text(json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """Read such a file."""
    return json.loads(path.read_text())
