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


@dataclass(frozen=True, slots=True)
class RawText:
    """A sample's text as it stands in its member."""

    place: str
    """The shard, the byte and the member."""
    form: str
    """txt, json, jsonl or npy."""
    content: bytes


def read_samples(stream: Readable, name: str, text_key: str) -> Iterator[Text | BadSample]:
    """Yield the documents of the tar in `stream` in order, and bad samples in their places.

    Blank documents are left out. Raises ArchiveError where the archive is damaged; what came before
    was whole.
    """
    for raw in read_raw(stream, name):
        if isinstance(raw, BadSample):
            yield raw
            continue
        try:
            yield from (text for text in _texts(raw, text_key) if not _is_blank(text))
        except ValueError as error:
            yield BadSample(f"{raw.place}: {error}")


def read_raw(stream: Readable, name: str) -> Iterator[RawText | BadSample]:
    """Yield the texts of a tar as `read_samples` does, still to be parsed."""
    for members in _samples(read_tar(stream, name)):
        first = next(iter(members.values()))
        place = f"{name}: byte {first.offset}: {shown(first.name)}"
        try:
            if "" in members:
                raise ValueError(_misplaced(first))
            yield _raw(members, place)
        except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            yield BadSample(f"{place}: {error}")


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


def _raw(members: dict[str, Member], place: str) -> RawText:
    """Return a sample's text; a ValueError says why it has none."""
    kind = next((kind for kind in TEXTS if kind in members), None)
    if kind is None:
        found = ", ".join(shown(kind) for kind in list(members)[:5])
        raise ValueError(f"the sample has {found}, but no {', '.join(TEXTS)}")
    content = bytes(members[kind].content)
    if kind.endswith(".gz"):
        content = gzip.decompress(content)
    form = kind.removesuffix(".gz")
    if form == "txt" and (at := content.find(b"\0")) >= 0:
        raise ValueError(f"a NUL at byte {at} of it: no text, or a hole in it")
    return RawText(place, form, content)


def _texts(raw: RawText, text_key: str) -> Iterator[Text]:
    """Yield the documents of a text."""
    if raw.form == "npy":
        yield _ids(raw.content)
        return
    text = raw.content.decode("utf-8-sig")
    if raw.form == "txt":
        yield text
    elif raw.form == "json":
        yield parse_line(text, raw.form, text_key).text
    else:
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield parse_line(line, f"line {number}", text_key).text


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
