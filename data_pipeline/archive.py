"""Strict reading of a tar: every byte is accounted for.

tarfile and WebDataset take a damaged header, a hole of zeros or a missing end for the end of the
archive. Here each is an error that names the byte. A tar is a sequence of 512-byte blocks: for
each member a header and its padded content, and at the end two blocks or more of zeros. Read are
POSIX.1-1988 (ustar), POSIX.1-2001 (pax), GNU and V7 headers, plain or under gzip or zstd.
"""

import gzip
import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol, cast

import zstandard

from data_pipeline.compression import ZstdStream

BLOCK = 512
END_BYTES = 2 * BLOCK
MAX_END_BYTES = END_BYTES + 20 * BLOCK
"""Writers fill up records of 20 blocks; more zeros than that are a hole at the end."""
CHUNK = 1 << 20

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.zstd")
"""Names of archives that can be read."""

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
OTHERS = {b"\x1f\x9d": "compress (.Z)", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\3\4": "zip"}

PLAIN, FOLDER = (b"0", b"\0", b"7"), b"5"
LONG_NAME, PAX, PAX_SUN, PAX_GLOBAL = b"L", b"x", b"X", b"g"
HEADERS = b"LKxXgVA"
"""What stands before a member: long names, pax, a volume's label, Solaris' access lists."""
NAMES = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a pipe",
    b"S": "a sparse file",
    b"M": "a part of a file",
    b"D": "a dumped folder",
}

OCTAL = re.compile(rb" *([0-7]*)[ \0]*")
PAX_RECORD = re.compile(rb"([0-9]{1,9}) ([^=]+)=")


class ArchiveError(ValueError):
    """Damage to an archive as a whole; the message names it and the byte."""


class Readable(Protocol):
    """What an archive is read from."""

    def read(self, size: int, /) -> "bytes | memoryview":
        """Return the next `size` bytes, or fewer near the end, and none at it."""


@dataclass(frozen=True, slots=True)
class Member:
    """A plain file of an archive."""

    name: str
    offset: int
    """Byte of its header, in the archive as it is without compression."""
    content: "bytes | memoryview"


class Memory:
    """Bytes as something to read from, without copying them."""

    def __init__(self, content: bytes) -> None:
        self._view = memoryview(content)

    def read(self, size: int, /) -> memoryview:
        """Return a view of the next `size` bytes."""
        part, self._view = self._view[:size], self._view[size:]
        return part


def decompressed(stream: BinaryIO, name: str) -> BinaryIO:
    """Return the tar within `stream`, whose first bytes tell how it is compressed."""
    start = cast(io.BufferedReader, stream).peek(8)
    if start.startswith(GZIP):
        return cast(BinaryIO, gzip.GzipFile(fileobj=stream))
    if start.startswith(ZSTD):
        return cast(BinaryIO, io.BufferedReader(ZstdStream(stream), CHUNK))
    for magic, kind in OTHERS.items():
        if start.startswith(magic):
            raise ArchiveError(f"{name}: is compressed by {kind}; a tar may be under gzip or zstd")
    return stream


def read_tar(stream: Readable, name: str) -> Iterator[Member]:
    """Yield the plain files of the tar in `stream`; folders are passed over.

    Any structural fault is an ArchiveError that starts with `name` and says at which byte. So is
    a member that is no file or folder, for its content would be missing.
    """
    try:
        yield from _members(_Reader(stream))
    except _Fault as fault:
        raise ArchiveError(f"{name}: {fault}") from None


class _Fault(Exception):
    """What is wrong, and at which byte."""


def _members(reader: "_Reader") -> Iterator[Member]:
    noted = _Noted()
    while True:
        place = reader.place
        header = bytes(reader.read(BLOCK, "no end blocks"))
        if header.count(0) == BLOCK:
            break
        try:
            size, kind = _checked(header)
            if kind in HEADERS:
                noted.update(kind, reader.content(size, "a header of its own"))
                continue
        except ValueError as error:
            raise _Fault(f"byte {place}: {error}") from None
        path = (noted.name or _name(header)).decode("utf-8", "surrogateescape")
        if kind == FOLDER or (kind in PLAIN and path.endswith("/")):
            noted.clear()
            continue
        if noted.is_sparse or kind not in PLAIN:
            what = "a sparse file" if noted.is_sparse else NAMES.get(kind, f"of type {kind!r}")
            raise _Fault(f"byte {place}: member {shown(path)} is {what}, no plain file")
        content = reader.content(size if noted.size is None else noted.size, path)
        noted.clear()
        yield Member(path, place, content)
    if noted.is_pending:
        raise _Fault(f"byte {place}: the end, after a name without its member")
    reader.finish(place)


def shown(path: str) -> str:
    """Return a member's name as it can be printed: on one line, and not too long."""
    text = path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 100 else f"{text[:100]}...")


class _Reader:
    """Reads blocks and knows how many; an end too soon is a fault."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self.place = 0

    def _some(self, size: int) -> "bytes | memoryview":
        try:
            return self._stream.read(size)
        except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError, EOFError) as error:
            raise _Fault(f"byte {self.place}: damaged compression: {error}") from None

    def read(self, size: int, missing: str) -> "bytes | memoryview":
        """Return exactly `size` bytes."""
        most = size if isinstance(self._stream, Memory) else CHUNK  # a false size is not believed
        part = self._some(min(size, most))
        if len(part) < size:
            parts = bytearray(part)
            while part and len(parts) < size:
                part = self._some(min(size - len(parts), most))
                parts += part
            part = bytes(parts)
        self.place += len(part)
        if len(part) < size:
            if missing != "no end blocks":
                missing = f"within {missing if missing.startswith('a ') else shown(missing)}"
            raise _Fault(f"cut at byte {self.place}, {missing}")
        return part

    def content(self, size: int, what: str) -> "bytes | memoryview":
        """Return a member's content, and read the padding after it."""
        content = self.read(size, what)
        if size % BLOCK:
            self.read(-size % BLOCK, what)
        return content

    def finish(self, place: int) -> None:
        """Check that zeros alone follow the block of zeros at `place`, as many as there must be."""
        while part := self._some(CHUNK):
            self.place += len(part)
            if any(part):
                raise _Fault(f"byte {place}: a block of zeros with data after it")
        rest = self.place - place
        if rest < END_BYTES or rest % BLOCK:
            raise _Fault(f"cut at byte {self.place}, within the end blocks")
        if rest > MAX_END_BYTES:
            raise _Fault(f"byte {place}: a hole of {rest} zeros, more than any end of a tar")


@dataclass
class _Noted:
    """What headers of their own say about the next member."""

    name: bytes | None = None
    size: int | None = None
    is_sparse: bool = False

    @property
    def is_pending(self) -> bool:
        return self.name is not None or self.size is not None

    def clear(self) -> None:
        self.name, self.size, self.is_sparse = None, None, False

    def update(self, kind: bytes, content: "bytes | memoryview") -> None:
        """Read a header of its own; a ValueError says what is wrong with it."""
        if kind == LONG_NAME:
            name = bytes(content)
            if not name.endswith(b"\0"):
                raise ValueError("a long name without its end")
            self._rename(name.rstrip(b"\0"))
        if kind not in (PAX, PAX_SUN, PAX_GLOBAL):
            return
        rest = bytes(content)
        while rest:  # records, each `LENGTH KEY=VALUE` and a line's end
            record = PAX_RECORD.match(rest)
            length = int(record[1]) if record else 0
            if record is None or not record.end() < length <= len(rest) or rest[length - 1] != 10:
                raise ValueError("a broken pax header")
            self._note(record[2], rest[record.end() : length - 1], kind == PAX_GLOBAL)
            rest = rest[length:]

    def _rename(self, name: bytes) -> None:
        if not name or b"\0" in name:
            raise ValueError("a long name that is empty or has NUL bytes")
        if self.name is not None:
            raise ValueError("a second long name for the same member")
        self.name = name

    def _note(self, key: bytes, value: bytes, is_global: bool) -> None:
        if is_global and key in (b"path", b"size"):
            raise ValueError(f"a pax header with one {key.decode()} for all members")
        if key == b"path":
            self._rename(value)
        elif key == b"size":
            if not value.isdigit() or len(value) > 18:
                raise ValueError(f"a pax header with the size {value[:20]!r}")
            self.size = int(value)
        elif key.startswith((b"GNU.sparse.", b"SUN.holes")):
            self.is_sparse = True


def _checked(header: bytes) -> tuple[int, bytes]:
    """Return a member's size and type; the header's checksum proves them."""
    stored = OCTAL.fullmatch(header, 148, 156)
    if stored is None or not stored[1]:
        raise ValueError("no tar header")
    # The sum counts its own field as eight spaces; some old writers summed signed bytes.
    difference = sum(header) - sum(header[148:156]) + 8 * ord(" ") - int(stored[1], 8)
    if difference and difference != 256 * sum(byte > 127 for byte in header):
        raise ValueError("the tar header's checksum is wrong")
    return _size(header[124:136]), header[156:157]


def _size(digits: bytes) -> int:
    """Read a size: octal digits or, where its first bit is set, a binary number (GNU)."""
    if digits[0] & 0x80:
        size = int.from_bytes(bytes([digits[0] & 0x7F]) + digits[1:], "big")
        if digits[0] != 0x80 or size >= 1 << 62:
            raise ValueError("a tar header with a negative or absurd size")
        return size
    octal = OCTAL.fullmatch(digits)
    if octal is None:
        raise ValueError(f"a tar header with the size {digits!r}")
    return int(octal[1] or b"0", 8)


def _name(header: bytes) -> bytes:
    """Return the name in a header, with ustar's prefix before it."""
    name, prefix = header[:100].partition(b"\0")[0], header[345:500].partition(b"\0")[0]
    is_ustar = header[257:263] == b"ustar\0"
    return prefix + b"/" + name if is_ustar and prefix else name
