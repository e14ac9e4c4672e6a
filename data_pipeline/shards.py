"""From a corpus to a folder of shards, by any number of processes and machines, in three steps.

    tokenize   units of the corpus -> pieces     any part of the units, anywhere
    write      buckets of pieces -> shards       once all units are there; any part of the buckets
    publish    shards and index appear           once all buckets are there

What a step has done lies in `FOLDER.building`, each file named by a hash of everything that it is
made from: whoever was killed, at whatever moment, is followed by someone who does the rest. The
shards depend on the corpus, the tokenizer, the seed and the sizes asked for, and on nothing else:
not on parts, processes, restarts, the machine or the clock.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from itertools import accumulate
from math import ceil
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.buckets import Entry, Piece, count_shards, write_bucket
from data_pipeline.census import Census
from data_pipeline.corpus import Document, Span, cut_into_units, read_blocks
from data_pipeline.index import INDEX_NAME, ShardIndex, load_index
from data_pipeline.sources import redacted, stat
from data_pipeline.spool import bucket_sizes, gather, write_piece
from data_pipeline.tokenizers import Tokenizer
from data_pipeline.tokenizing import Encoded, Encoder, EncoderPool, follow
from data_pipeline.workplace import Workplace, read_json, write_json

FORMAT = 1  # of what lies in the folder of a building; another one is not gone on with
UNIT_BYTES = 256 << 20  # what is lost at most by a kill: seconds to a minute of work
BUCKET_BYTES = 1 << 30  # of text: what one process shuffles at a time
KEPT_ERRORS = 5  # of each unit

Progress = Callable[[str, Census], None]
"""Told what is being done, and the counts so far."""


@dataclass(frozen=True)
class Layout:
    """How documents are laid out in shards."""

    seed: int
    min_shards: int
    shard_mib: float


class Building:
    """The shards of a corpus in the making."""

    def __init__(
        self,
        folder: str | Path,
        units: Sequence[tuple[Span, ...]],
        encoder: Encoder,
        layout: Layout,
    ) -> None:
        self.folder = Path(folder).absolute()
        self._units = units
        self._encoder = encoder
        self._layout = layout
        sizes = [_size_of(span) for unit in units for span in unit]
        self._buckets = max(1, ceil(sum(sizes) / BUCKET_BYTES))
        names = [self._name_unit(number) for number in range(len(units))]
        plan = _hash([names, layout.min_shards, layout.shard_mib])
        self.place = Workplace(self.folder, names, plan)

    @property
    def num_units(self) -> int:
        """Number of units of the corpus."""
        return len(self._units)

    @property
    def num_buckets(self) -> int:
        """Number of buckets that its documents are shuffled in."""
        return self._buckets

    @property
    def missing_units(self) -> list[int]:
        """The units that are not tokenized yet."""
        return [n for n in range(self.num_units) if not self.place.unit(n).exists()]

    @property
    def missing_buckets(self) -> list[int]:
        """The buckets that are not written yet."""
        return [b for b in range(self._buckets) if not self.place.bucket(b).exists()]

    def locked(self, *, shared: bool) -> AbstractContextManager[None]:
        """Keep the place: parts share it with one another, and with nobody who publishes.

        Raises:
            ValueError: If someone else is at work, or the folder holds other things than shards.
        """
        if self.folder.exists():
            _check_replaceable(self.folder)
        # What it takes seconds to do again is not kept when a mistake ends the work.
        return self.place.locked(shared=shared, keeps_on_refusal=self.num_units > 1)

    def tokenize(
        self, pool: EncoderPool, part: int = 0, parts: int = 1, progress: Progress | None = None
    ) -> None:
        """Tokenize the units `part`, `part` + `parts`, ... that are not there yet."""
        done = Census()
        mine = range(part, self.num_units, parts)
        for count, number in enumerate(mine):
            title = f"part {count + 1} of {len(mine)} of the text"
            if not self.place.unit(number).exists():
                errors: list[str] = []
                blocks = read_blocks(self._units[number], self._encoder.on_error(errors))
                self._write_unit(number, pool.encode(blocks), errors, done, title, progress)
            done += self._census(number)
            if progress:
                progress(title, done)

    def _write_unit(
        self,
        number: int,
        batches: Iterable[Encoded],
        errors: list[str],
        done: Census,
        title: str,
        progress: Progress | None,
    ) -> None:
        """Write a unit's pieces, and then the file that says that they are all there.

        `errors` gets what is skipped while the batches are read.
        """
        census = Census()
        in_batches: list[str] = []

        def counted() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            nonlocal census
            for batch in batches:
                census += batch.census
                in_batches.extend(batch.errors[:KEPT_ERRORS])
                if progress:
                    progress(title, done + census)
                yield batch.ids, batch.lengths

        pieces = 0
        for piece in gather(counted()):
            key = (self._layout.seed, number, pieces, 0, 0)
            write_piece(self.place.piece(number, pieces), piece, self._buckets, key)
            pieces += 1
        census += Census(skipped=len(errors))
        first_errors = (in_batches + errors)[:KEPT_ERRORS]
        facts = {"pieces": pieces, "census": asdict(census), "errors": first_errors}
        write_json(self.place.unit(number), facts)

    def write(
        self,
        part: int = 0,
        parts: int = 1,
        *,
        workers: int = 1,
        progress: Progress | None = None,
    ) -> None:
        """Write the buckets `part`, `part` + `parts`, ... that are not there yet."""
        todo = [bucket for bucket in self.missing_buckets if bucket % parts == part]
        if not todo:
            return
        sizes = self._bucket_sizes()
        _check_enough(int(sizes[:, 0].sum()), self._layout.min_shards, self.folder)
        counts = count_shards(
            sizes,
            min_shards=self._layout.min_shards,
            shard_mib=self._layout.shard_mib,
            itemsize=self._encoder.dtype.itemsize,
        )
        firsts = list(accumulate(counts, initial=0))
        self.place.shards.mkdir(exist_ok=True)
        write = partial(self._write_bucket, self._pieces(), firsts)
        processes = min(len(todo), workers or len(os.sched_getaffinity(0)))
        if processes > 1:
            context = get_context("fork")
            with ProcessPoolExecutor(processes, context, follow, (os.getpid(),)) as pool:
                _report(pool.map(write, todo), len(todo), progress)
        else:
            _report(map(write, todo), len(todo), progress)

    def _write_bucket(self, pieces: list[Piece], firsts: list[int], bucket: int) -> Census:
        entries = write_bucket(
            pieces,
            bucket,
            self.place.shards,
            first_shard=firsts[bucket],
            num_shards=firsts[bucket + 1] - firsts[bucket],
            dtype=self._encoder.dtype,
            seed=self._layout.seed,
        )
        write_json(self.place.bucket(bucket), entries)
        documents, tokens = (
            sum(int(entry[key]) for entry in entries) for key in ("docs", "tokens")
        )
        return Census(documents=documents, tokens=tokens)

    def publish(self) -> ShardIndex:
        """Write the index, and let the folder appear in one step; an earlier one goes."""
        entries: list[Entry] = []
        for bucket in range(self._buckets):
            entries += read_json(self.place.bucket(bucket))
        census = self.census()
        index = {
            "shards": entries,
            "dtype": self._encoder.dtype.name,
            "tokenizer_sha256": self._encoder.tokenizer.sha256,
            "tokenizer_kind": self._encoder.tokenizer.kind,
            "vocab_size": self._encoder.tokenizer.vocab_size,
            "docs": census.documents,
            "tokens": census.tokens,
            "seed": self._layout.seed,
            "special_ids": self._encoder.tokenizer.specials,
            "text": census.summary(),
        }
        listed = {entry["url"] for entry in entries}
        for left_by_killed in self.place.shards.iterdir():
            if left_by_killed.name not in listed:
                left_by_killed.unlink()
        write_json(self.place.shards / INDEX_NAME, index)
        if self.folder.exists():
            self.folder.rename(self.place.earlier)
        self.place.shards.rename(self.folder)
        self.place.clear()
        return load_index(self.folder)

    def census(self) -> Census:
        """Return the counts of all units that are there."""
        there = (self._census(n) for n in range(self.num_units) if self.place.unit(n).exists())
        return sum(there, start=Census())

    def errors(self) -> list[str]:
        """Return the first errors of each unit that were skipped."""
        facts = (self._facts(number) for number in range(self.num_units))
        return [error for unit in facts for error in unit["errors"]]

    def _bucket_sizes(self) -> np.ndarray:
        sizes = np.zeros((self._buckets, 2), dtype=np.int64)
        for piece in self._pieces():
            sizes += bucket_sizes(piece.path)
        return sizes

    def _pieces(self) -> list[Piece]:
        """Return all pieces in the order of the corpus."""
        pieces, first = [], 0
        for number in range(self.num_units):
            facts = self._facts(number)
            pieces += [Piece(self.place.piece(number, n), first) for n in range(facts["pieces"])]
            first += facts["census"]["documents"]
        return pieces

    def _name_unit(self, number: int) -> str:
        """Hash all that a unit's pieces depend on."""
        spans = []
        for span in self._units[number]:
            known = stat(span.path)
            place = [redacted(span.path), span.start, span.end]
            spans.append([*place, known.size, known.version])
        encoder = self._encoder
        made_by = [encoder.tokenizer.sha256, encoder.text_key, encoder.skips_errors]
        return _hash([FORMAT, number, spans, made_by, self._layout.seed, self._buckets])

    def _facts(self, number: int) -> dict[str, Any]:
        facts: dict[str, Any] = read_json(self.place.unit(number))
        return facts

    def _census(self, number: int) -> Census:
        return Census(**self._facts(number)["census"])


def write_shards(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    seed: int,
    min_shards: int,
    shard_mib: float,
    workers: int,
) -> ShardIndex:
    """Write documents from memory as shards into `folder`, which appears whole or not at all.

    The shards are those that a corpus of the same documents becomes; nothing is kept to go on from.
    `workers` is a number of processes, 0 for one a core. An earlier folder of shards is replaced.
    """
    layout = Layout(seed=seed, min_shards=min_shards, shard_mib=shard_mib)
    building = Building(folder, [()], Encoder(tokenizer), layout)
    with building.locked(shared=False), EncoderPool(Encoder(tokenizer), workers) as pool:
        building.place.clear()
        building.place.path.mkdir()
        try:
            building._write_unit(0, pool.encode(documents), [], Census(), "", None)
            building.write()
            return building.publish()
        finally:
            building.place.clear()


def plan_building(
    folder: str | Path, files: Sequence[str], encoder: Encoder, layout: Layout
) -> Building:
    """Return the building of a corpus's files."""
    return Building(folder, cut_into_units(files, UNIT_BYTES), encoder, layout)


def _check_enough(num_documents: int, min_shards: int, folder: Path) -> None:
    if num_documents == 0:
        raise ValueError(f"no document to write into {folder}: the corpus is empty or blank")
    if num_documents < min_shards:
        raise ValueError(
            f"{num_documents} documents do not fill {min_shards} shards, one for each lane: set "
            f"data.lanes to {num_documents} or less, or give more documents"
        )


def _check_replaceable(folder: Path) -> None:
    """Refuse to replace what is not a folder of shards."""
    foreign = folder.is_file() or any(
        entry.name != INDEX_NAME and entry.suffix != ".tar" for entry in folder.iterdir()
    )
    if foreign:
        raise ValueError(f"{folder} exists and holds other things than shards; name a new folder")


def _report(buckets: Iterable[Census], total: int, progress: Progress | None) -> None:
    done = Census()
    for number, census in enumerate(buckets, 1):
        done += census
        if progress:
            progress(f"written {number} of {total}", done)


def _size_of(span: Span) -> int:
    return (stat(span.path).size or 0) if span.end is None else span.end - span.start


def _hash(value: object) -> str:
    return sha256(json.dumps(value).encode()).hexdigest()[:16]
