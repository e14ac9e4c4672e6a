"""The texts in WebDataset tars that others made.

A sample is the run of members whose names are alike up to the first dot (`a/b.txt`, `a/b.jpg`). Its
text is its member `txt`, or else `json` (the text under a key), `jsonl` (a document a line) or
`npy` (token ids); each but the last may end in `.gz`. Other members are let be. Nothing proves such
a shard but its structure: the archive's (see `data_pipeline.archive`), and each sample's.
"""

import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data_pipeline.archive import Member, Readable, read_tar, shown
from data_pipeline.corpus import parse_line
from data_pipeline.index import ARRAY_HEADER, parse_array

TEXTS = ("txt", "txt.gz", "json", "json.gz", "jsonl", "jsonl.gz", "npy")
"""Members that hold a sample's text; the first of these that a sample has is read."""
MEMBER = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")
META = re.compile(r"(?:.*/)?__[^/]*__(?:$|[/.])")
"""Notes on the archive itself, which WebDataset passes over too."""

Text = str | np.ndarray
"""A document: its text, or its token ids."""


@dataclass(frozen=True, slots=True)
class BadSample:
    """What is wrong within one sample, in one line that names the shard, the byte, the member."""

    reason: str


def read_samples(stream: Readable, name: str, text_key: str) -> Iterator[Text | BadSample]:
    """Yield the documents of the tar in `stream` in order, and bad samples in their places.

    Blank documents are left out. Raises ArchiveError where the archive is damaged; what came before
    was whole.
    """
    for members in _samples(read_tar(stream, name)):
        first = next(iter(members.values()))
        try:
            if "" in members:
                raise ValueError(_misplaced(first))
            yield from (text for text in _texts(members, text_key) if not _is_blank(text))
        except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            yield BadSample(f"{name}: byte {first.offset}: {shown(first.name)}: {error}")


def _samples(tar: Iterator[Member]) -> Iterator[dict[str, Member]]:
    """Yield each sample's members by kind; what belongs to no sample stands alone, as kind ''."""
    seen: set[str] = set()
    key, members = "", dict[str, Member]()
    for member in tar:
        if META.match(member.name):
            continue
        parts = MEMBER.fullmatch(member.name)
        if parts is not None and parts[1] == key and parts[2].lower() not in members:
            members[parts[2].lower()] = member
            continue
        if members:
            yield members
            members = {}
        if parts is None or parts[1] in seen:
            yield {"": member}
        else:
            key = parts[1]
            seen.add(key)
            members = {parts[2].lower(): member}
    if members:
        yield members


def _misplaced(member: Member) -> str:
    """Say why a member belongs to no sample."""
    if MEMBER.fullmatch(member.name) is None:
        return "is not of a sample, KEY.KIND"
    return "stands there twice, or apart from the rest of its sample"


def _texts(members: dict[str, Member], text_key: str) -> Iterator[Text]:
    """Yield the documents of a sample; a ValueError says why it has none."""
    kind = next((kind for kind in TEXTS if kind in members), None)
    if kind is None:
        raise ValueError(f"the sample has {', '.join(members)}, but no {', '.join(TEXTS)}")
    content = bytes(members[kind].content)
    if kind.endswith(".gz"):
        content = gzip.decompress(content)
    form = kind.removesuffix(".gz")
    if form == "npy":
        yield _ids(content)
    elif form == "txt":
        yield _checked(content.decode("utf-8-sig"))
    elif form == "json":
        yield _checked(parse_line(content.decode("utf-8-sig"), kind, text_key).text)
    else:
        lines = content.decode("utf-8-sig").split("\n")
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _checked(parse_line(line, f"line {number}", text_key).text)


def _checked(text: str) -> str:
    """Refuse a text with a NUL: no text has one, and a hole in a file is full of them."""
    if (at := text.find("\0")) >= 0:
        raise ValueError(f"a NUL at character {at}: no text, or a hole in it")
    return text


def _ids(content: bytes) -> np.ndarray:
    """Return the ids of a .npy file; 0 stands for padding, and a hole is full of it."""
    header = ARRAY_HEADER.match(content)
    dtype = "uint32" if header and header[1] == b"u4" else "uint16"
    ids = parse_array(content, np.dtype(dtype).newbyteorder("<"))
    if ids.size and not ids.all():
        raise ValueError("holds the id 0, which no document has: a hole in it")
    return ids


def _is_blank(text: Text) -> bool:
    return isinstance(text, str) and (not text or text.isspace())
