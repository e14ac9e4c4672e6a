"""The tar reader against Python's own, and against damage at every kind of place."""

import gzip
import io
import os
import tarfile

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.archive import ArchiveError, Memory, decompressed, read_tar


def make_tar(files: dict[str, bytes], form: int = tarfile.USTAR_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def read(content: bytes) -> dict[str, bytes]:
    stream = io.BufferedReader(io.BytesIO(content))
    members = list(read_tar(decompressed(stream, "x"), "x"))
    assert len({member.name for member in members}) == len(members)
    return {member.name: bytes(member.content) for member in members}


NAMES = st.text(
    st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=90
)
FILES = st.dictionaries(NAMES, st.binary(max_size=1500), max_size=5)
FORMATS = st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
COMPRESSIONS = {
    "tar": lambda content: content,
    "gz": lambda content: gzip.compress(content, mtime=0),
    "zst": zstandard.ZstdCompressor().compress,
}


@given(files=FILES, form=FORMATS, compression=st.sampled_from([*COMPRESSIONS]), deep=st.booleans())
@settings(max_examples=60, deadline=None)
def test_what_pythons_tarfile_writes_is_read(
    files: dict[str, bytes], form: int, compression: str, deep: bool
) -> None:
    if deep:  # names over 100 bytes have headers of their own
        files = {f"{'d' * 150}/{name}": content for name, content in files.items()}
    content = make_tar(files, form)
    assert read(COMPRESSIONS[compression](content)) == files
    assert [member.name for member in read_tar(Memory(content), "x")] == [*files]


def test_prefixes_folders_and_large_sizes() -> None:
    name = "/".join(["folder"] * 20) + "/file.txt"
    content = make_tar({name: b"text"})
    assert read(content) == {name: b"text"}
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for folder in ("a", "a/b"):
            info = tarfile.TarInfo(folder)
            info.type = tarfile.DIRTYPE
            tar.addfile(info)
    assert read(stream.getvalue()) == {}
    # a size in binary, as GNU writes it over 8 GiB, is read as one
    header = bytearray(make_tar({"a": b"x" * 600}))
    header[124:136] = b"\x80" + (600).to_bytes(11, "big")
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * 32 + sum(header[156:512]))
    assert read(bytes(header)) == {"a": b"x" * 600}


@pytest.mark.parametrize("name", [b"", b"folder/a\0b", b"\0" * 3], ids=["no", "cut", "blank"])
def test_a_long_name_that_is_damaged_is_not_replaced_by_the_short_one(name: bytes) -> None:
    content = make_tar({"d" * 150: b"text"}, tarfile.GNU_FORMAT)
    damaged = content[:512] + name.ljust(512, b"\0") + content[1024:]
    with pytest.raises(ArchiveError, match="byte 0: a long name that is empty or has NUL bytes"):
        read(damaged)
    with pytest.raises(ArchiveError, match="byte 1024: a second long name for the same member"):
        read(content[:1024] + content)
    with pytest.raises(ArchiveError, match="byte 0: a long name without its end"):
        read(content[:512] + b"x" * 512 + content[1024:])


SHARD = make_tar({f"{n}.txt": bytes([65 + n]) * (400 + 300 * n) for n in range(6)})
END = len(SHARD.rstrip(b"\0"))
END += -END % 512


def changed(place: int, new: bytes) -> bytes:
    return SHARD[:place] + new + SHARD[place + len(new) :]


DAMAGE = {
    "cut in a payload": (SHARD[:700], r"cut at byte 700, within '0\.txt'"),
    "cut in a header": (SHARD[:1100], r"cut at byte 1100, no end blocks"),
    "cut between samples": (SHARD[:1024], r"cut at byte 1024, no end blocks"),
    "cut after a header": (SHARD[:512], r"cut at byte 512, within '0\.txt'"),
    "end blocks gone": (SHARD[:END], rf"cut at byte {END}, no end blocks"),
    "one end block": (SHARD[: END + 512], r"within the end blocks"),
    "a zeroed header": (changed(1024, bytes(512)), r"byte 1024: a block of zeros with data"),
    "a zeroed hole": (changed(1024, bytes(2048)), r"byte 1024: a block of zeros with data"),
    "zeroed to the end": (
        SHARD[:1024] + bytes(len(SHARD) * 2 - 1024),
        r"byte 1024: a hole of \d+ zeros",
    ),
    "a garbage header": (changed(1024, os.urandom(512)), r"byte 1024: "),
    "another archive after it": (SHARD + SHARD, r"a block of zeros with data after it"),
    "nothing at all": (b"", r"cut at byte 0, no end blocks"),
    "no archive": (b"<html>Not Found</html>" * 60, r"byte 0: no tar header"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_damage_names_the_byte(damage: str, compression: str) -> None:
    content, message = DAMAGE[damage]
    with pytest.raises(ArchiveError, match=rf"^x: .*{message}") as caught:
        read(COMPRESSIONS[compression](content))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("compression", ["gz", "zst"])
def test_cuts_of_what_is_compressed_are_found_at_every_byte(compression: str) -> None:
    content = COMPRESSIONS[compression](SHARD)
    for end in range(len(content)):
        with pytest.raises(ArchiveError):
            read(content[:end])
    assert len(read(content)) == 6


@given(place=st.integers(0, END - 1), bit=st.integers(0, 7))
def test_any_bit_of_a_header_counts(place: int, bit: int) -> None:
    flipped = changed(place, bytes([SHARD[place] ^ 1 << bit]))
    try:
        names = [*read(flipped)]
    except ArchiveError:
        return
    assert names == [*read(SHARD)]  # it was in a payload, or in the padding after one


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (tarfile.SYMTYPE, "a symbolic link"),
        (tarfile.LNKTYPE, "a hard link"),
        (tarfile.CHRTYPE, "a device"),
        (tarfile.FIFOTYPE, "a pipe"),
        (tarfile.GNUTYPE_SPARSE, "a sparse file"),
        (b"z", "of type b'z'"),
    ],
)
def test_what_is_no_plain_file_is_named(kind: bytes, message: str) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
        info = tarfile.TarInfo("a\nb.txt")
        info.type = kind
        tar.addfile(info)
    with pytest.raises(ArchiveError, match=rf"^x: byte 0: member 'a\\nb\.txt' is {message}, no"):
        read(stream.getvalue())


@pytest.mark.parametrize("start", [b"\x1f\x9d", b"BZh9", b"\xfd7zXZ\0", b"PK\3\4"])
def test_other_compressions_are_named(start: bytes) -> None:
    with pytest.raises(ArchiveError, match=r"x: is compressed by .*; a tar may be under gzip"):
        read(start + bytes(1000))


def block(name: bytes, kind: bytes, content: bytes = b"", size: bytes | None = None) -> bytes:
    """Return a member of any kind, with any size in its header."""
    header = bytearray(512)
    header[: len(name)] = name
    header[124:136] = (size or b"%011o" % len(content)).ljust(12, b"\0")
    header[156:157] = kind
    header[257:265] = b"ustar\x0000"
    header[148:156] = b"%06o\0 " % (sum(header) + 8 * 32)
    return bytes(header) + content + bytes(-len(content) % 512)


def pax(*records: bytes) -> bytes:
    """Return pax records, each with its length before it."""
    return b"".join(b"%d %s\n" % (len(record) + 4, record) for record in records)


FILE = block(b"a.txt", b"0", b"text")
ODD: dict[str, tuple[bytes, dict[str, bytes] | str]] = {
    "a volume's label": (block(b"label", b"V") + FILE, {"a.txt": b"text"}),
    "access lists": (block(b"a.txt", b"A", b"acl") + FILE, {"a.txt": b"text"}),
    "a file of version 7": (block(b"a.txt", b"\0", b"text"), {"a.txt": b"text"}),
    "a folder with a size": (block(b"d", b"5", size=b"1") + FILE, {"a.txt": b"text"}),
    "a folder of version 7": (block(b"d/", b"\0") + FILE, {"a.txt": b"text"}),
    "no name": (block(b"", b"0", b"x"), {"": b"x"}),
    "a name in pax": (block(b"x", b"x", pax(b"path=b.txt")) + FILE, {"b.txt": b"text"}),
    "a size in pax": (
        block(b"x", b"x", pax(b"size=4")) + block(b"a.txt", b"0", size=b"777")[:512] + FILE[512:],
        {"a.txt": b"text"},
    ),
    "notes for all": (block(b"g", b"g", pax(b"comment=1")) + FILE, {"a.txt": b"text"}),
    "other attributes": (block(b"x", b"x", pax(b"SCHILY.x.y=1")) + FILE, {"a.txt": b"text"}),
    "a name for all": (block(b"g", b"g", pax(b"path=b")) + FILE, "one path for all members"),
    "a hole by GNU": (block(b"x", b"x", pax(b"GNU.sparse.a=1")) + FILE, "is a sparse file"),
    "a hole by Sun": (block(b"x", b"x", pax(b"SUN.holesdata=1")) + FILE, "is a sparse file"),
    "a negative pax size": (block(b"x", b"x", pax(b"size=-5")) + FILE, "the size b'-5'"),
    "pax without its end": (block(b"x", b"x", b"9 path=b ") + FILE, "a broken pax header"),
    "pax too short": (block(b"x", b"x", b"99 path=b\n") + FILE, "a broken pax header"),
    "pax without a length": (block(b"x", b"x", b"path=b\n") + FILE, "a broken pax header"),
    "a negative size": (block(b"a", b"0", size=b"\xff" * 12), "a negative or absurd size"),
    "an absurd size": (block(b"a", b"0", size=b"\x80" + b"\xff" * 11), "a negative or absurd size"),
    "a size that is none": (block(b"a", b"0", size=b"12x"), "the size b'12x"),
    "a name and no member": (block(b"x", b"x", pax(b"path=b.txt")), "a name without its member"),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_headers_are_read_right_or_named(case: str) -> None:
    content, expected = ODD[case]
    content += bytes(1024)
    if isinstance(expected, dict):
        assert read(content) == expected
        return
    with pytest.raises(ArchiveError, match=rf"^x: byte \d+: .*{expected}"):
        read(content)
