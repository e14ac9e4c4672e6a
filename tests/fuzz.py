"""The readers of tars and of index.json on damaged input: refuse in one line, or lose nothing.

    python -m tests.fuzz [--minutes 10] [--seed 1]

Archives and indexes that are whole are damaged at random: bits flipped, bytes cut out, put in,
blanked, doubled, moved, swapped, the end cut off. What a reader then says must be one line that
names the file. What it takes must be what Python's `tarfile` reads from the same bytes, and where a
checksum guards the content (gzip, index.json's sha256) what had been written. Anything else, an
exception of another kind, or ten seconds without an end is a finding, printed with its case's
number (`--case N` repeats it).
"""

import argparse
import collections
import gzip
import io
import itertools
import json
import random
import resource
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import zstandard
from rich.console import Console
from rich.table import Table

from data_pipeline.archive import GZIP, ZSTD, Readable, decompressed, read_tar
from data_pipeline.config import TokenizerConfig
from data_pipeline.corpus import Document
from data_pipeline.index import load_index, read_shard
from data_pipeline.samples import read_samples
from data_pipeline.shards import write_shards
from data_pipeline.tokenizers import load_tokenizer

PATIENCE_S = 10
MOST_MEMORY = 8 << 30
"""Of address space: a false size that is believed shows as a MemoryError."""
FORMS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
REFUSED, SAME, TAKEN = "refused", "same as whole", "other than whole"


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Return `content` after one to three damages, at single bytes or at blocks of a tar."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 3))):
        unit = rng.choice((1, 512))
        start = rng.randrange(len(data) // unit + 1) * unit
        size = rng.randint(1, 3) * unit if rng.random() < 0.8 else rng.randint(1, 3000)
        part = data[start : start + size]
        match rng.choice(("flip", "cut", "end", "zero", "noise", "double", "move", "digit")):
            case "flip" if part:
                data[start + rng.randrange(len(part))] ^= 1 << rng.randrange(8)
            case "cut":
                del data[start : start + size]
            case "end":
                del data[start:]
            case "zero":
                data[start : start + size] = bytes(len(part))
            case "noise":
                data[start:start] = rng.randbytes(size)
            case "double":
                data[start:start] = part
            case "move":
                del data[start : start + size]
                place = rng.randrange(len(data) // unit + 1) * unit
                data[place:place] = part
            case "digit" if part:
                data[start + rng.randrange(len(part))] = rng.choice(b'0123456789-"[]{},:. \n\xff')
    return bytes(data)


def with_checksums(content: bytes) -> bytes:
    """Return a damaged tar whose headers' checksums hold again: what is behind them is read."""
    data = bytearray(content)
    for start in range(0, len(data) - 511, 512):
        if data[start + 257 : start + 262] == b"ustar":
            data[start + 148 : start + 156] = b" " * 8
            data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])
    return bytes(data)


Archive = list[tuple[str, bytes]]
Reader = Callable[[Readable, str], Iterable[tuple[str, bytes]]]


def our_members(stream: Readable, name: str) -> Archive:
    return [(member.name, bytes(member.content)) for member in read_tar(stream, name)]


def their_members(content: bytes) -> tuple[Archive, bool]:
    """Return what Python's tarfile finds, and whether it came to the end.

    It takes a header with an owner or a time that is no number for the end.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(content), errors="surrogateescape") as tar:
            files = ((info, tar.extractfile(info)) for info in tar if info.isreg())
            found = [(info.name, file.read()) for info, file in files if file]
            return found, not any(content[tar.offset : tar.offset + 512])
    except tarfile.ReadError:
        return [], False


class Archives:
    """Tars of texts, as others make them."""

    def __init__(self, read: Reader = our_members) -> None:
        self._read = read
        texts = {
            f"{'folder/' * (7 * (n % 3))}{n:03}.txt": b"text %d\n" % n * 9**n for n in range(4)
        }
        texts["noted.json"] = json.dumps({"text": "ü" * 300}).encode()
        texts[f"{'ö' * 120}.txt"] = b"x" * 512
        self._texts = texts

    def strike(self, rng: random.Random) -> tuple[str, str]:
        """Damage an archive and read it; return its kind and what came of it."""
        form, packed = rng.choice([*FORMS]), rng.choice(("tar", "gz", "zst"))
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=FORMS[form]) as tar:
            for name, content in self._texts.items():
                if form == "ustar" and not name.isascii():
                    continue
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        whole, kind = stream.getvalue(), f"{form}.{packed}"
        inside = rng.random() < 0.5
        content = damaged(whole, rng) if inside else whole
        if inside and rng.random() < 0.5:
            content, kind = with_checksums(content), f"{kind}, resealed"
        content = PACK[packed](content)
        if not inside:
            content = damaged(content, rng)
        try:
            source = decompressed(io.BufferedReader(io.BytesIO(content)), "the shard")
            found = list(self._read(source, "the shard"))
        except (ValueError, OSError) as error:
            check_line(error, "the shard")
            found = None
        check_samples(content)
        if found is None:
            return kind, REFUSED
        same = found == their_members(whole)[0]
        if content.startswith(GZIP):
            assert inside or same, "a gzip whose content is not what was written"
            content = gzip.decompress(content)
        elif content.startswith(ZSTD):
            reader = zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True)
            content = reader.read()
        theirs, at_end = their_members(content)
        names = f"{[n for n, _ in found]}, and tarfile {[n for n, _ in theirs]}"
        assert found[: len(theirs)] == theirs, names
        assert len(found) == len(theirs) or not at_end, names
        return kind, SAME if same else TAKEN


PACK: dict[str, Callable[[bytes], bytes]] = {
    "tar": bytes,
    "gz": lambda content: gzip.compress(content, mtime=0),
    "zst": zstandard.ZstdCompressor().compress,
}


def check_samples(content: bytes) -> None:
    """Read the texts of an archive too: bad ones are told, in one line."""
    try:
        source = decompressed(io.BufferedReader(io.BytesIO(content)), "the shard")
        for sample in read_samples(source, "the shard", "text"):
            if not isinstance(sample, str | np.ndarray):
                check_line(sample.reason, "the shard")
    except (ValueError, OSError) as error:
        check_line(error, "the shard")


def check_line(error: object, name: str) -> None:
    line = str(error)
    assert name in line, f"an error that does not name the file: {line!r}"
    assert len(line.splitlines()) == 1, f"an error of several lines: {line!r}"
    assert len(line) < 1000, f"an error of {len(line)} characters"


class Shards:
    """Token shards and their index."""

    def __init__(self, folder: Path) -> None:
        documents = [Document(f"d{n}", f"text {n} " * 9 ** (n % 4)) for n in range(12)]
        tokenizer = load_tokenizer(TokenizerConfig(kind="bytes"))
        self._folder = folder
        self._index = write_shards(
            documents, tokenizer, folder, seed=1, min_shards=3, shard_mib=1, workers=1
        )
        self._whole = [read_shard(self._index, n) for n in range(len(self._index.shards))]

    def strike(self, rng: random.Random) -> tuple[str, str]:
        """Damage a shard or the index, and read all; return its kind and what came of it."""
        number = rng.randrange(-len(self._whole), len(self._whole))  # half of them the index
        path = self._folder / "index.json" if number < 0 else self._index.path(number)
        whole = path.read_bytes()
        content = damaged(whole, rng)
        path.write_bytes(content)
        try:
            index = load_index(self._folder)
            found = [read_shard(index, n) for n in range(len(index.shards))]
        except (ValueError, OSError) as error:
            check_line(error, str(self._folder))
            found = None
        finally:
            path.write_bytes(whole)
        kind = "index.json" if number < 0 else "indexed shard"
        if found is None:
            return kind, REFUSED
        same = list(itertools.chain(*found)), list(itertools.chain(*self._whole))
        assert len(same[0]) == len(same[1]), f"{len(same[0])} documents of {len(same[1])}"
        pairs = zip(*same, strict=True)
        # an index may list its shards in another order; every document is still there
        alike = all(np.array_equal(a, b) for a, b in pairs)
        assert alike or number < 0, "a shard whose documents are others"
        return kind, SAME if alike else TAKEN


def strike(number: int, seed: int, targets: list[Archives | Shards]) -> tuple[str, str]:
    """Run one case; an AssertionError says what it found."""
    rng = random.Random(f"{seed}/{number}")
    signal.alarm(PATIENCE_S)
    try:
        return rng.choice(targets).strike(rng)
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}") from error
    finally:
        signal.alarm(0)


def hang(*_: object) -> None:
    raise AssertionError(f"no end after {PATIENCE_S} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="run this one alone")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    signal.signal(signal.SIGALRM, hang)
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    findings = 0
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        targets = [Archives(), Archives(), Shards(Path(folder) / "shards")]
        numbers = itertools.count() if options.case is None else iter([options.case])
        for number in itertools.takewhile(lambda _: time.monotonic() < end, numbers):
            try:
                counts[strike(number, options.seed, targets)] += 1
            except AssertionError as finding:
                findings += 1
                print(f"case {number}: {finding}", file=sys.stderr)
    kinds = sorted({kind for kind, _ in counts})
    table = Table("damaged", "cases", REFUSED, SAME, TAKEN)
    for kind in kinds:
        outcomes = [counts[kind, outcome] for outcome in (REFUSED, SAME, TAKEN)]
        table.add_row(kind, f"{sum(outcomes):,}", *(f"{n:,}" for n in outcomes))
    Console().print(table)
    print(f"seed {options.seed}: {counts.total():,} cases, {findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
