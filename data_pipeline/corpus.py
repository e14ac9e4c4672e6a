"""Documents from text files: .txt (one a file) and .jsonl (one a line), plain or compressed.

The order is that of the sources, and sorted by path within a folder or a pattern. A source that
cannot be read to its end is an error that names the file and the line: nothing is left out in
silence but blank documents.
"""

import glob
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, cast

import zstandard

from data_pipeline.compression import ZstdStream

FORMATS = (".txt", ".jsonl")
COMPRESSIONS = ("", ".gz", ".zst", ".xz")
SUFFIXES = tuple(form + compression for form in FORMATS for compression in COMPRESSIONS)
ACCEPTED = "a .txt or .jsonl file (also .gz, .zst, .xz)"


@dataclass(frozen=True, slots=True)
class Document:
    """One text, with the key that names it in messages."""

    key: str
    text: str


def read_documents(sources: Sequence[str], text_key: str = "text") -> Iterator[Document]:
    """Yield every document of `sources` (files, folders, glob patterns) that is not blank."""
    for path in source_files(sources):
        for document in _read_file(path, text_key):
            if document.text and not document.text.isspace():
                yield document


def source_files(sources: Sequence[str]) -> list[str]:
    """Return the text files that `sources` name, in the order in which they are read."""
    return [path for source in sources for path in _files(source)]


def _files(source: str) -> list[str]:
    """Return the text files that a source names, in order."""
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
    if not path.lower().endswith(SUFFIXES):
        raise ValueError(f"corpus: {path} is not {ACCEPTED}")
    return path


def _read_file(path: str, text_key: str) -> Iterator[Document]:
    stem, extension = os.path.splitext(path.lower())
    is_lines = (stem if extension in COMPRESSIONS else path.lower()).endswith(".jsonl")
    with _open(path) as stream:
        if is_lines:
            for number, line in enumerate(stream, 1):
                if not line.isspace():
                    yield parse_line(_decode(line, path, number), f"{path}:{number}", text_key)
        else:
            yield Document(path, _decode(stream.read(), path, 1))


def parse_line(line: str, place: str, text_key: str) -> Document:
    """Return the document of a line of JSON; a ValueError says why it has none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{place}: a {type(record).__name__}, but each line must be an object")
    text = record.get(text_key)
    if not isinstance(text, str):
        found = "no" if text_key not in record else f"a {type(text).__name__} as"
        raise ValueError(f"{place}: {found} {text_key!r}; set corpus.text_key to the text's key")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: lone surrogate at character {error.start}") from None
    return Document(str(record.get("key", record.get("id", place))), text)


def _decode(data: bytes, path: str, line: int) -> str:
    """Decode UTF-8 that starts at `line` of a file; a byte order mark at its start is no text."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        byte = data[error.start]
        raise ValueError(f"{path}:{line}: not UTF-8: byte 0x{byte:02x}, {error.reason}") from None


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
