"""Shards without an index, tokenized where they are read: others' tars, wherever they are."""

import glob
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import sha256
from typing import overload

import numpy as np

from data_pipeline.archive import SUFFIXES, ArchiveError, decompressed
from data_pipeline.reading import Documents, Fault, Reading
from data_pipeline.samples import BadSample, Text, read_samples
from data_pipeline.sources import PIPE, SourceError, Stat, expand, is_remote, redacted, stat
from data_pipeline.specials import Specials
from data_pipeline.tokenizers import Tokenizer

ASKERS = 16  # threads that ask for sizes


@dataclass(frozen=True, eq=False)
class ForeignShards:
    """Tars of text, in the order in which their names were given."""

    name: str
    """What was named, for messages."""
    urls: tuple[str, ...]
    stats: tuple[Stat, ...]
    tokenizer: Tokenizer
    text_key: str = "text"
    reading: Reading = field(default=Reading())

    epoch_tokens = None  # not known before all is tokenized

    @property
    def specials(self) -> Specials:
        """The tokenizer's special ids."""
        return self.tokenizer.specials

    @cached_property
    def sha256(self) -> str:
        """Fingerprint of the shards' names, sizes and versions, and of the text's key."""
        facts = [
            (redacted(url).rpartition("/")[2], known.size, known.version)
            for url, known in zip(self.urls, self.stats, strict=True)
        ]
        return sha256(json.dumps([self.text_key, facts]).encode()).hexdigest()

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Each shard's bytes; 1 where they are not known."""
        return tuple(known.size or 1 for known in self.stats)

    def read(self, shard: int) -> Documents:
        """Return a shard's documents, each tokenized when it is taken."""
        url, known = self.urls[shard], self.stats[shard]
        is_lenient = self.reading.on_error == "skip_sample"
        try:
            try:
                return self._read(url, known, keep_start=False)
            except ArchiveError:
                if not self.reading.forget(url, known) and not is_lenient:
                    raise
                return self._read(url, known, keep_start=is_lenient)  # what is remote, once more
        except (ValueError, OSError) as error:
            return self.reading.skipped(redacted(url), error)

    def _read(self, url: str, known: Stat, *, keep_start: bool) -> Documents:
        texts, faults, name = list[Text](), list[str](), redacted(url)
        with self.reading.stream(url, known) as stream:
            try:
                for text in read_samples(decompressed(stream, name), name, self.text_key):
                    if not isinstance(text, BadSample):
                        texts.append(text)
                    elif self.reading.on_error == "skip_sample":
                        faults.append(text.reason)
                    else:
                        raise SourceError(text.reason)
            except ArchiveError as error:
                while stream.read(1 << 20):  # where the source itself failed, that is the reason
                    pass
                if not texts or not keep_start:
                    raise
                faults.append(f"{error}; what came before is kept")
        fault = Fault(name, len(faults), faults[0]) if faults else None
        return Documents(_Tokenized(texts, self.tokenizer), fault)

    def fetch_ahead(self, shard: int) -> None:
        """Begin to bring a shard near."""
        self.reading.fetch_ahead(self.urls[shard], self.stats[shard])


class _Tokenized(Sequence[np.ndarray]):
    """Texts as ids, made one at a time: nobody waits for a whole shard to be tokenized."""

    def __init__(self, texts: list[Text], tokenizer: Tokenizer) -> None:
        self._texts = texts
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self._texts)

    @overload
    def __getitem__(self, place: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, place: slice) -> "_Tokenized": ...
    def __getitem__(self, place: int | slice) -> "np.ndarray | _Tokenized":
        if isinstance(place, slice):
            return _Tokenized(self._texts[place], self._tokenizer)
        text = self._texts[place]
        return self._tokenizer.encode(text) if isinstance(text, str) else text


def is_foreign(source: str) -> bool:
    """Whether a source is shards without an index, by its name or by what is in the folder."""
    if source.startswith(PIPE) or _path(source).endswith(SUFFIXES):
        return True
    if is_remote(source) or not os.path.isdir(source):
        return not _path(source).endswith(".json") and (
            glob.has_magic(source) or os.path.isfile(source)
        )
    return not os.path.exists(os.path.join(source, "index.json")) and bool(_in_folder(source))


def open_foreign(
    source: str, tokenizer: Tokenizer, text_key: str, reading: Reading
) -> ForeignShards:
    """Find the shards that `source` names, and ask each for its size and version.

    Raises:
        SourceError: If there are none, or one cannot be reached.
    """
    urls = _in_folder(source) if os.path.isdir(source) else expand(source, reading.patience)
    for url in urls:
        if not url.startswith(PIPE) and not _path(url).endswith(SUFFIXES):
            raise SourceError(f"{redacted(url)}: is none of {', '.join(SUFFIXES)}")
    with ThreadPoolExecutor(ASKERS) as pool:
        stats = tuple(pool.map(partial(_stat, patience=reading), urls))
    return ForeignShards(redacted(source), tuple(urls), stats, tokenizer, text_key, reading)


def first_document(shards: ForeignShards) -> None:
    """Read until the first document, which tells that there is one, and that it can be read.

    Raises:
        ValueError: If there is none, or what stands before it is damaged and not to be skipped.
    """
    reading = shards.reading
    for url, known in zip(shards.urls, shards.stats, strict=True):
        name = redacted(url)
        try:
            with reading.stream(url, known) as stream:
                tar = decompressed(stream, name)
                for text in read_samples(tar, name, shards.text_key):
                    if not isinstance(text, BadSample):
                        return
                    if reading.on_error != "skip_sample":
                        raise SourceError(text.reason)
        except OSError as error:
            raise SourceError(f"{name}: {error.strerror or error}") from None
        except ValueError as error:
            reading.skipped(name, error)
    raise SourceError(f"{shards.name} holds no document; take it out")


def verify_foreign(shards: ForeignShards) -> tuple[int, list[str]]:
    """Return how many documents the shards hold, and everything that is wrong, a line each."""
    documents, problems = 0, list[str]()
    for url, known in zip(shards.urls, shards.stats, strict=True):
        name = redacted(url)
        try:
            with shards.reading.stream(url, known) as stream:
                tar = decompressed(stream, name)
                for text in read_samples(tar, name, shards.text_key):
                    if isinstance(text, BadSample):
                        problems.append(text.reason)
                    else:
                        documents += 1
        except OSError as error:
            problems.append(f"{name}: {error.strerror or error}")
        except ValueError as error:
            problems.append(str(error))
    return documents, problems


def _stat(url: str, patience: Reading) -> Stat:
    try:
        return stat(url, patience.patience)
    except OSError as error:
        raise SourceError(f"{url}: {error.strerror}") from None


def _in_folder(folder: str) -> list[str]:
    return sorted(entry.path for entry in os.scandir(folder) if entry.name.endswith(SUFFIXES))


def _path(url: str) -> str:
    """Return a URL's path, in small letters."""
    return redacted(url).lower()
