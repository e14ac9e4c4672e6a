"""Documents to ids by several processes, in order.

One process reads blocks of bytes; the others parse and tokenize them, and answer with ids. What
comes out does not depend on how many they are.
"""

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from data_pipeline.census import Census, histogram
from data_pipeline.corpus import BLOCK_BYTES, Block, Document, OnError, keep_in, stop
from data_pipeline.tokenizers import Tokenizer

BATCHES_AHEAD = 4  # per process; bounds the text in memory


class Encoded(NamedTuple):
    """The ids of a batch of documents, end to end."""

    ids: np.ndarray
    lengths: np.ndarray
    """int64, ids of each document."""
    census: Census
    errors: list[str]
    """Why texts were skipped."""


@dataclass(frozen=True)
class Encoder:
    """How blocks become ids."""

    tokenizer: Tokenizer
    text_key: str = "text"
    skips_errors: bool = False

    @property
    def dtype(self) -> np.dtype:
        """The type in which ids are stored."""
        return np.dtype("<u2" if self.tokenizer.vocab_size <= 2**16 else "<u4")

    def on_error(self, errors: list[str]) -> OnError:
        """Return what is done with a text that cannot be read."""
        return keep_in(errors) if self.skips_errors else stop

    def encode(self, batch: list[Block | Document]) -> Encoded:
        """Tokenize a batch."""
        errors: list[str] = []
        on_error = self.on_error(errors)
        encoded: list[np.ndarray] = []
        blank = num_bytes = 0
        for item in batch:
            for document in _documents(item, self.text_key, on_error):
                if document.is_blank:
                    blank += 1
                    continue
                encoded.append(self.tokenizer.encode(document.text))
                num_bytes += len(document.text.encode())  # now cheap: SentencePiece has asked it
        lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
        ids = np.concatenate([np.zeros(0, dtype=np.int32), *encoded])
        census = Census(
            documents=len(encoded),
            tokens=len(ids),
            bytes=num_bytes,
            unknown=self.tokenizer.count_unknown(ids),
            blank=blank,
            skipped=len(errors),
            lengths=histogram(lengths),
        )
        return Encoded(ids.astype(self.dtype), lengths, census, errors)


def _documents(item: Block | Document, text_key: str, on_error: OnError) -> Iterable[Document]:
    return [item] if isinstance(item, Document) else item.documents(text_key, on_error)


class EncoderPool:
    """Processes that tokenize; as a context, they end with it."""

    def __init__(self, encoder: Encoder, workers: int) -> None:
        """Prepare `workers` processes, 0 for one a core; a single one is this process itself."""
        self._encoder = encoder
        self._workers = workers or len(os.sched_getaffinity(0))
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self._workers > 1:
            arguments = (self._encoder, os.getpid())
            context = get_context("fork")
            self._pool = ProcessPoolExecutor(self._workers, context, _start_worker, arguments)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def encode(self, items: Iterable[Block | Document]) -> Iterator[Encoded]:
        """Yield the ids of `items`, batch by batch, in order."""
        if self._pool is None:
            yield from map(self._encoder.encode, _batches(items))
            return
        pending: deque[Future[Encoded]] = deque()
        for batch in _batches(items):
            pending.append(self._pool.submit(_encode_in_worker, batch))
            if len(pending) > BATCHES_AHEAD * self._workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _batches(items: Iterable[Block | Document]) -> Iterator[list[Block | Document]]:
    """Group items to about BLOCK_BYTES."""
    batch: list[Block | Document] = []
    size = 0
    for item in items:
        batch.append(item)
        size += item.num_bytes if isinstance(item, Block) else len(item.text)
        if size >= BLOCK_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


_encoder: Encoder


def _start_worker(encoder: Encoder, parent: int) -> None:
    global _encoder
    _encoder = encoder
    follow(parent)


def follow(parent: int) -> None:
    """Make this process one that leaves Ctrl-C to its parent, and goes when that goes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()


def _exit_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _encode_in_worker(batch: list[Block | Document]) -> Encoded:
    return _encoder.encode(batch)
