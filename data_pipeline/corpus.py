"""Documents from text files: .txt (one a file) and .jsonl (one a line), plain or compressed.

The order is that of the sources, and sorted by path within a folder or a pattern. A source that
cannot be read to its end is an error that names the file and the line; `corpus.on_error: skip`
goes on behind it, and counts. Only blank documents are left out otherwise, counted too.

    files -> units of spans -> blocks of raw bytes -> documents

Blocks are cheap to read, so one process reads for many that parse. A plain .jsonl can be cut into
spans anywhere: a span holds the lines that begin in it.
"""

import glob
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn, cast

import orjson
import zstandard

from data_pipeline import archive
from data_pipeline.compression import ZstdStream
from data_pipeline.reading import Reading
from data_pipeline.sources import PIPE, expand, is_remote, redacted, stat

FORMATS = (".txt", ".jsonl")
COMPRESSIONS = ("", ".gz", ".zst", ".xz")
SUFFIXES = (
    *(form + compression for form in FORMATS for compression in COMPRESSIONS),
    *archive.SUFFIXES,
)
ACCEPTED = "a .txt or .jsonl file (also .gz, .zst, .xz) or a .tar of texts (also .gz, .zst)"


BLOCK_BYTES = 1 << 18  # some 50 ms of tokenizing


@dataclass(frozen=True, slots=True)
class Document:
    """One text, with the key that names it in messages."""

    key: str
    text: str

    @property
    def is_blank(self) -> bool:
        """Whether it holds nothing but white space."""
        return not self.text or self.text.isspace()


OnError = Callable[[ValueError], None]
"""What is done with a text that cannot be read; by returning it lets the next one come."""


def stop(error: ValueError) -> NoReturn:
    """Let nothing be left out."""
    raise error


def keep_in(errors: list[str]) -> OnError:
    """Return what leaves out such a text, and puts the reason into `errors`."""

    def keep(error: ValueError) -> None:
        errors.append(str(error))

    return keep


def read_documents(
    sources: Sequence[str], text_key: str = "text", on_error: OnError = stop
) -> Iterator[Document]:
    """Yield every document of `sources` (files, folders, glob patterns) that is not blank."""
    for path in source_files(sources):
        for block in read_blocks([Span(path)], on_error):
            for document in block.documents(text_key, on_error):
                if not document.is_blank:
                    yield document


def source_files(sources: Sequence[str]) -> list[str]:
    """Return the text files that `sources` name, in the order in which they are read."""
    return [path for source in sources for path in _files(source)]


def _files(source: str) -> list[str]:
    """Return the text files that a source names, in order."""
    if is_remote(source):
        return [url if url.startswith(PIPE) else _checked(url) for url in expand(source)]
    if os.path.isdir(source):
        return _folder(source)
    if os.path.exists(source):
        return [_checked(source)]
    matches = sorted(glob.glob(source, recursive=True))
    if not matches:
        raise ValueError(f"corpus: {source} does not exist; name {ACCEPTED}, a folder or a pattern")
    files: list[str] = []
    for match in matches:
        if not os.path.isdir(match):
            files.append(_checked(match))
        elif "**" not in source:  # `**` has listed what is inside already
            files.extend(_folder(match))
    return files


def _folder(folder: str) -> list[str]:
    """Return the text files below `folder`, links followed, hidden names left out."""
    files: list[str] = []
    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        seen.add(os.path.realpath(parent))
        folders[:] = sorted(
            name
            for name in folders
            if name[0] != "." and os.path.realpath(os.path.join(parent, name)) not in seen
        )
        files.extend(
            os.path.join(parent, name)
            for name in names
            if name[0] != "." and name.lower().endswith(SUFFIXES)
        )
    if not files:
        raise ValueError(f"corpus: the folder {folder} holds no text; it needs {ACCEPTED}")
    return sorted(files)


def _checked(path: str) -> str:
    if is_remote(path) and not _is_archive(path):
        raise ValueError(f"corpus: {redacted(path)} is not a .tar of texts, read as it comes")
    if not redacted(path).lower().endswith(SUFFIXES):
        raise ValueError(f"corpus: {path} is not {ACCEPTED}")
    return path


@dataclass(frozen=True, slots=True)
class Span:
    """A file, or the lines of a plain .jsonl that begin at byte `start` or later, before `end`."""

    path: str
    start: int = 0
    end: int | None = None


def cut_into_units(files: Iterable[str], unit_bytes: int) -> list[tuple[Span, ...]]:
    """Return the files' spans in order, in groups of about `unit_bytes` bytes.

    Plain .jsonl files are cut to that size; a compressed file or a text stays whole.
    """
    units: list[tuple[Span, ...]] = []
    group: list[Span] = []
    free = unit_bytes
    for path in files:
        size = stat(path).size or 0
        if size > unit_bytes and path.lower().endswith(".jsonl"):
            units += [tuple(group)] if group else []
            starts = range(0, size, unit_bytes)
            units += [(Span(path, start, min(start + unit_bytes, size)),) for start in starts]
            group, free = [], unit_bytes
            continue
        group.append(Span(path))
        free -= size
        if free <= 0:
            units.append(tuple(group))
            group, free = [], unit_bytes
    return units + ([tuple(group)] if group else [])


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes of a file that hold whole documents, still to be parsed."""

    span: Span
    lines: tuple[bytes, ...]
    """Lines of a .jsonl; one item, the whole text, of any other file or member of a .tar."""
    first_line: int
    """Number of the first one, counted from the span's start."""
    is_text: bool

    @property
    def num_bytes(self) -> int:
        """Size of all lines."""
        return sum(map(len, self.lines))

    def documents(self, text_key: str, on_error: OnError = stop) -> Iterator[Document]:
        """Parse the block; what is no document goes to `on_error` as a line for people."""
        for number, line in enumerate(self.lines, self.first_line):
            try:
                if (document := self._document(line, number, text_key)) is not None:
                    yield document
            except UnicodeDecodeError as error:
                number += line.count(b"\n", 0, error.start)
                reason = f"not UTF-8: byte 0x{line[error.start]:02x}, {error.reason}"
                on_error(ValueError(f"{self._place(number)}: {reason}"))
            except ValueError as error:
                on_error(ValueError(f"{self._place(number)}: {error}"))

    def _document(self, line: bytes, number: int, text_key: str) -> Document | None:
        """Return a line's document, or that of the whole text; None for a blank line."""
        key = f"{self.span.path}:{number}"
        if not self.is_text and (document := _parse_strictly(line, key, text_key)):
            return document
        text = line.decode("utf-8-sig")  # a byte order mark at the start is no text
        if self.is_text:
            return Document(self.span.path, text)
        return None if text.isspace() else _parse_line(text, key, text_key)

    def _place(self, number: int) -> str:
        """Return path and line; lines before the span are counted only where one is at fault."""
        if not self.span.start:
            return f"{self.span.path}:{number}"
        with open(self.span.path, "rb") as file:
            left = self.span.start
            while left and (chunk := file.read(min(left, 1 << 20))):
                number, left = number + chunk.count(b"\n"), left - len(chunk)
        return f"{self.span.path}:{number}"


def read_blocks(spans: Iterable[Span], on_error: OnError = stop) -> Iterator[Block]:
    """Yield the content of `spans`, in blocks of BLOCK_BYTES or a whole line or text."""
    for span in spans:
        try:
            yield from (
                _read_archive(span.path, on_error) if _is_archive(span.path) else _read_span(span)
            )
        except ValueError as error:
            on_error(error)


def _is_archive(path: str) -> bool:
    return path.startswith(PIPE) or redacted(path).lower().endswith(archive.SUFFIXES)


def _read_archive(path: str, on_error: OnError) -> Iterator[Block]:
    """Yield each text of a tar as a block, whose path tells the member too."""
    from data_pipeline.samples import BadSample, read_raw  # which parses by this module

    name = redacted(path)
    with Reading().stream(path, stat(path)) as stream:
        for raw in read_raw(archive.decompressed(stream, name), name):
            if isinstance(raw, BadSample):
                on_error(ValueError(raw.reason))
            elif raw.form == "npy":
                on_error(ValueError(f"{raw.place}: holds ids, which are no text"))
            else:
                is_lines = raw.form == "jsonl"
                lines = tuple(raw.content.splitlines(keepends=True)) if is_lines else (raw.content,)
                yield Block(Span(raw.place), lines, 1, is_text=raw.form == "txt")


def _read_span(span: Span) -> Iterator[Block]:
    stem, extension = os.path.splitext(span.path.lower())
    is_lines = (stem if extension in COMPRESSIONS else span.path.lower()).endswith(".jsonl")
    with _open(span.path) as stream:
        if not is_lines:
            yield Block(span, (stream.read(),), 1, is_text=True)
            return
        place, number = span.start, 1
        if place:  # a line that begins before it belongs to the span before
            stream.seek(place - 1)
            place += len(stream.readline()) - 1
            number += 1 if place > span.start else 0
        while span.end is None or place < span.end:
            most = BLOCK_BYTES if span.end is None else min(BLOCK_BYTES, span.end - place)
            # Of lines that are as long as its hint, readlines takes one too many; 0 is no hint.
            lines = stream.readlines(most - 1) if most > 1 else [stream.readline()]
            if not any(lines):
                return
            yield Block(span, tuple(lines), number, is_text=False)
            place, number = place + sum(map(len, lines)), number + len(lines)


def parse_line(line: str, place: str, text_key: str) -> Document:
    """Return the document of a line of JSON; a ValueError says why it has none, and where."""
    try:
        return _parse_strictly(line, place, text_key) or _parse_line(line, place, text_key)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _parse_strictly(line: bytes | str, key: str, text_key: str) -> Document | None:
    """Parse by orjson, in a fifth of the time; None where json says why not, or takes it (NaN)."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return _document_of(record, key, text_key)


def _parse_line(line: str, key: str, text_key: str) -> Document:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    document = _document_of(record, key, text_key)
    try:
        document.text.encode()
    except UnicodeEncodeError as error:  # an escape can write half a character
        raise ValueError(f"lone surrogate at character {error.start}") from None
    return document


def _document_of(record: Any, key: str, text_key: str) -> Document:
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, but each line must be an object")
    text = record.get(text_key)
    if not isinstance(text, str):
        found = "no" if text_key not in record else f"a {type(text).__name__} as"
        raise ValueError(f"{found} {text_key!r}; set corpus.text_key to the text's key")
    return Document(str(record.get("key", record.get("id", key))), text)


@contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    """Open a file for reading, decompressed; damage becomes one line that names the file."""
    suffix = os.path.splitext(path.lower())[1]
    try:
        with open(path, "rb") as raw:
            if suffix in COMPRESSIONS and os.path.getsize(path) == 0:
                raise EOFError("it has no bytes")
            if suffix == ".gz":
                yield cast(BinaryIO, gzip.GzipFile(fileobj=raw))
            elif suffix == ".xz":
                yield cast(BinaryIO, lzma.LZMAFile(raw))
            elif suffix == ".zst":
                yield io.BufferedReader(ZstdStream(raw), 1 << 20)
            else:
                yield raw
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError, zstandard.ZstdError, EOFError) as error:
        raise ValueError(f"{path}: damaged {suffix} file: {error}") from None
