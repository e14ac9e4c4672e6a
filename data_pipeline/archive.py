"""Strict reading of a shard's tar: every byte is accounted for.

tarfile and WebDataset take a damaged header, a hole of zeros or a missing end for the end of the
archive. Here each is an error that names the byte. A tar is a sequence of 512-byte blocks: for
each member a header and its padded content, and at the end two blocks or more of zeros.
"""

import re
from collections.abc import Iterator

import numpy as np

BLOCK = 512
END_BYTES = 2 * BLOCK
MEMBER_NAME = re.compile(rb"(\d{9,})\.npy\0")
ARRAY_HEADER = re.compile(
    rb"\x93NUMPY\x01\0..\{'descr': '<(u\d)', 'fortran_order': False, 'shape': \((\d+),\), \} *\n",
    re.DOTALL,
)


def read_members(content: bytes, dtype: str, name: str) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (key, ids) of each member of the tar `content`; `ids` are views into it.

    Any structural fault is a ValueError that starts with `name` and says at which byte.
    """
    expected = np.dtype(dtype).newbyteorder("<")
    view = memoryview(content)
    offset = 0
    while True:
        header = content[offset : offset + BLOCK]
        if len(header) < BLOCK:
            raise ValueError(f"{name}: cut at byte {len(content)}, no end blocks")
        if header.count(0) == BLOCK:
            break
        key, size = _parse_header(header, f"{name}: byte {offset}")
        start = offset + BLOCK
        offset = start + -(-size // BLOCK) * BLOCK
        if offset > len(content):
            raise ValueError(f"{name}: cut at byte {len(content)}, within document {key:09d}")
        yield key, _parse_array(view[start : start + size], expected, f"{name}: document {key:09d}")
    rest = len(content) - offset
    if content.count(0, offset) != rest:
        raise ValueError(f"{name}: byte {offset}: a block of zeros with data after it")
    if rest < END_BYTES or rest % BLOCK:
        raise ValueError(f"{name}: cut at byte {len(content)}, within the end blocks")


def _parse_header(header: bytes, place: str) -> tuple[int, int]:
    """Return the key and the content's size of a member (POSIX.1-1988 ustar)."""
    try:
        checksum = int(header[148:156].rstrip(b" \0"), 8)
        size = int(header[124:136].rstrip(b" \0"), 8)
    except ValueError:
        raise ValueError(f"{place}: no tar header") from None
    # The sum counts its own field as eight spaces.
    if checksum != sum(header) - sum(header[148:156]) + 8 * ord(" ") or size < 0:
        raise ValueError(f"{place}: the tar header's checksum is wrong")
    member = MEMBER_NAME.match(header)
    if member is None or header[156:157] != b"0":
        raise ValueError(f"{place}: the member is not a document, NUMBER.npy")
    return int(member[1]), size


def _parse_array(content: memoryview, dtype: np.dtype, place: str) -> np.ndarray:
    """Return the ids in a .npy file as `numpy.save` writes it."""
    header = ARRAY_HEADER.match(content)
    if header is None or header[1].decode() != dtype.str[1:]:
        raise ValueError(f"{place}: not an array of {dtype.name} ids")
    ids = np.frombuffer(content, dtype=np.uint8, offset=header.end())
    if ids.size != int(header[2]) * dtype.itemsize:
        raise ValueError(f"{place}: {ids.size} bytes of ids, its header says {int(header[2])} ids")
    return ids.view(dtype)
