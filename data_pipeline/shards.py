"""Documents to shards: tokenized by several processes, shuffled by seed, written as tars.

The result depends on the documents, the tokenizer, the seed and the sizes asked for, and on
nothing else: not on the number of processes, the machine or the clock. Ids wait in a spool file
until the last document is known, so memory holds a few numbers a document, whatever its length.
"""

import heapq
import json
import os
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import file_digest
from math import ceil
from multiprocessing import get_context
from pathlib import Path
from typing import BinaryIO

import numpy as np
import webdataset

from data_pipeline.corpus import Document
from data_pipeline.index import INDEX_NAME, ShardIndex, load_index
from data_pipeline.seeding import generator
from data_pipeline.tokenizers import Tokenizer

MIB = 2**20
MEMBER_OVERHEAD = 512 + 128 + 256  # tar header, array header, half a block of padding
BATCH_CHARACTERS = 1 << 18  # a batch of documents: some 100 ms of tokenizing
BATCHES_AHEAD = 4  # per process; bounds the text in memory

Progress = Callable[[int, int], None]
Tokens = tuple[np.ndarray, np.ndarray]  # ids of a batch of documents; how many each has


def write_shards(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    seed: int,
    min_shards: int,
    shard_mib: float,
    workers: int,
    progress: Progress | None = None,
) -> ShardIndex:
    """Write `documents` as shards into `folder`, which appears whole or not at all.

    There are `min_shards` shards, or more where they would exceed `shard_mib` MiB, and a document
    is never split. `workers` is a number of processes, 0 for one a core. `progress` is called with
    the documents and tokens done so far. An earlier folder of shards is replaced.
    """
    folder = Path(folder)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    with _staged(folder) as staging:
        with open(staging / "spool", "w+b") as file:
            batches = _tokenize(documents, tokenizer, dtype, workers)
            spool = _Spool(file, dtype, _report(batches, progress))
            num_documents, num_tokens = len(spool.lengths), int(spool.lengths.sum())
            _check_enough(num_documents, min_shards, folder)
            size = MEMBER_OVERHEAD * num_documents + dtype.itemsize * num_tokens
            num_shards = max(min_shards, min(num_documents, ceil(size / (shard_mib * MIB))))
            entries = [
                _write_shard(staging / f"shard-{shard:05d}.tar", ordinals, spool)
                for shard, ordinals in enumerate(_deal(spool.lengths, num_shards, seed))
            ]
        (staging / "spool").unlink()
        index = {
            "shards": entries,
            "dtype": dtype.name,
            "tokenizer_sha256": tokenizer.sha256,
            "tokenizer_kind": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "docs": num_documents,
            "tokens": num_tokens,
            "seed": seed,
        }
        (staging / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")
    return load_index(folder)


def _check_enough(num_documents: int, min_shards: int, folder: Path) -> None:
    if num_documents == 0:
        raise ValueError(f"no document to write into {folder}: the corpus is empty or blank")
    if num_documents < min_shards:
        raise ValueError(
            f"{num_documents} documents do not fill {min_shards} shards, one for each lane: set "
            f"data.lanes to {num_documents} or less, or give more documents"
        )


@contextmanager
def _staged(folder: Path) -> Iterator[Path]:
    """Yield a folder beside `folder` that takes its place at the end, or goes if that fails."""
    folder = folder.absolute()
    if folder.exists():
        _check_replaceable(folder)
    new_parents = [parent for parent in folder.parents if not parent.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    earlier = staging.with_suffix(".old")
    try:
        staging.mkdir()
        yield staging
        if folder.exists():
            folder.rename(earlier)
        staging.rename(folder)
        shutil.rmtree(earlier, ignore_errors=True)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        with suppress(OSError):  # someone else uses it by now
            for parent in new_parents:
                parent.rmdir()
        raise


def _check_replaceable(folder: Path) -> None:
    """Refuse to replace what is not a folder of shards."""
    foreign = folder.is_file() or any(
        entry.name != INDEX_NAME and entry.suffix != ".tar" for entry in folder.iterdir()
    )
    if foreign:
        raise ValueError(f"{folder} exists and holds other things than shards; name a new folder")


class _Spool:
    """The ids of every document, end to end in a file, and in memory how many each has."""

    def __init__(self, file: BinaryIO, dtype: np.dtype, batches: Iterable[Tokens]) -> None:
        self._file = file
        self._dtype = dtype
        lengths = [np.zeros(0, dtype=np.int64)]
        for ids, counts in batches:
            file.write(ids.data)
            lengths.append(counts)
        self.lengths = np.concatenate(lengths)
        self._ends = np.cumsum(self.lengths)

    def __getitem__(self, document: int) -> np.ndarray:
        length = int(self.lengths[document])
        self._file.seek((int(self._ends[document]) - length) * self._dtype.itemsize)
        return np.frombuffer(self._file.read(length * self._dtype.itemsize), dtype=self._dtype)


def _report(batches: Iterable[Tokens], progress: Progress | None) -> Iterator[Tokens]:
    """Pass `batches` on and tell `progress` of each."""
    num_documents = num_tokens = 0
    for ids, counts in batches:
        yield ids, counts
        num_documents, num_tokens = num_documents + len(counts), num_tokens + len(ids)
        if progress:
            progress(num_documents, num_tokens)


def _deal(lengths: np.ndarray, num_shards: int, seed: int) -> list[np.ndarray]:
    """Return each shard's documents: drawn at random, given to the shard with the fewest tokens."""
    owner = np.empty(len(lengths), dtype=np.int64)
    heap = [(0, shard) for shard in range(num_shards)]
    for document in generator(seed).permutation(len(lengths)):
        tokens, shard = heap[0]
        owner[document] = shard
        # Every document weighs something, so that no shard stays empty.
        heapq.heapreplace(heap, (tokens + int(lengths[document]) + 2, shard))
    ordinals = np.argsort(owner, kind="stable")
    return np.split(ordinals, np.cumsum(np.bincount(owner, minlength=num_shards))[:-1])


def _write_shard(path: Path, documents: np.ndarray, spool: _Spool) -> dict[str, str | int]:
    """Write documents, given by their ordinals, as one tar; return its entry of the index."""
    with open(path, "wb") as file, webdataset.TarWriter(file, mtime=0) as writer:
        for document in documents.tolist():
            writer.write({"__key__": f"{document:09d}", "npy": spool[document]})
    with open(path, "rb") as written:
        digest = file_digest(written, "sha256").hexdigest()
    return {
        "url": path.name,
        "docs": len(documents),
        "tokens": int(spool.lengths[documents].sum()),
        "bytes": path.stat().st_size,
        "sha256": digest,
    }


def _tokenize(
    documents: Iterable[Document], tokenizer: Tokenizer, dtype: np.dtype, workers: int
) -> Iterator[Tokens]:
    """Yield the tokens of `documents`, batch by batch, in order."""
    batches = _batches(documents)
    workers = workers or len(os.sched_getaffinity(0))
    if workers == 1:
        for batch in batches:
            yield _encode(tokenizer, dtype, batch)
        return
    with ProcessPoolExecutor(
        workers, get_context("fork"), _start_worker, (tokenizer, dtype, os.getpid())
    ) as pool:
        pending: deque[Future[Tokens]] = deque()
        try:
            for batch in batches:
                pending.append(pool.submit(_encode_in_worker, batch))
                if len(pending) > BATCHES_AHEAD * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _batches(documents: Iterable[Document]) -> Iterator[list[str]]:
    """Group texts into batches of about BATCH_CHARACTERS."""
    batch: list[str] = []
    characters = 0
    for document in documents:
        batch.append(document.text)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(tokenizer: Tokenizer, dtype: np.dtype, batch: list[str]) -> Tokens:
    encoded = [tokenizer.encode(text) for text in batch]
    return np.concatenate(encoded).astype(dtype), np.array([len(ids) for ids in encoded])


_worker: tuple[Tokenizer, np.dtype]


def _start_worker(tokenizer: Tokenizer, dtype: np.dtype, parent: int) -> None:
    """Prepare a tokenizing process: it leaves Ctrl-C to its parent, and goes when that goes."""
    global _worker
    _worker = tokenizer, dtype
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()


def _exit_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _encode_in_worker(batch: list[str]) -> Tokens:
    return _encode(*_worker, batch)
