"""The index of a folder of shards: what is in each, and the fingerprints that prove it.

A shard is an ordinary WebDataset tar with one member `KEY.npy` per document: its token ids, a
one-dimensional array, without special ids. KEY is the document's ordinal in the corpus.
`index.json` stands beside the shards and is written last.
"""

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
)

from data_pipeline.archive import ArchiveError, Memory, read_tar
from data_pipeline.reading import Documents, Reading
from data_pipeline.sources import PATIENT, Patience, Stat, chunks, is_remote, redacted
from data_pipeline.specials import STANDARD, Specials

INDEX_NAME = "index.json"
NUM_WRAPPED = 2  # [CLS] and [SEP] around each document
MEMBER_NAME = re.compile(r"(\d{9,})\.npy")
ARRAY_HEADER = re.compile(
    rb"\x93NUMPY\x01\0..\{'descr': '<(u\d)', 'fortran_order': False, 'shape': \((\d+),\), \} *\n",
    re.DOTALL,
)
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ShardInfo(BaseModel):
    """One shard as it was written."""

    model_config = ConfigDict(frozen=True, strict=True)

    url: str
    """Where it is, relative to the index."""
    docs: PositiveInt
    tokens: NonNegativeInt
    bytes: PositiveInt
    sha256: Sha256


class ShardIndex(BaseModel):
    """The shards of a folder, in order."""

    model_config = ConfigDict(frozen=True, strict=True)

    folder: Path
    shards: Annotated[tuple[ShardInfo, ...], Field(min_length=1, strict=False)]
    dtype: Literal["uint16", "uint32"]
    tokenizer_sha256: Sha256
    tokenizer_kind: str
    vocab_size: PositiveInt
    docs: PositiveInt
    tokens: NonNegativeInt
    seed: int
    special_ids: Annotated[
        tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt, NonNegativeInt, NonNegativeInt],
        Field(strict=False),
    ] = STANDARD
    """[PAD], [UNK], [CLS], [SEP], [MASK] of the tokenizer."""
    sha256: Sha256
    """Fingerprint of the index file, and by its sha256 entries of all the data."""
    base: str = ""
    """Where the index is, if that is no local folder."""
    reading: InstanceOf[Reading] = Field(default=Reading(), exclude=True)
    """How the shards are read."""

    @property
    def name(self) -> str:
        """Where the index is, for messages."""
        return redacted(self.base) or str(self.folder)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Each shard's tokens, wrapped documents counted."""
        return tuple(info.tokens + NUM_WRAPPED * info.docs for info in self.shards)

    @property
    def epoch_tokens(self) -> int:
        """Tokens of an epoch."""
        return sum(self.sizes)

    @property
    def specials(self) -> Specials:
        """The tokenizer's special ids."""
        return Specials(*self.special_ids)

    def path(self, shard: int) -> Path:
        """Return where a local shard's file is."""
        return self.folder / self.shards[shard].url

    def url(self, shard: int) -> str:
        """Return where a shard is. What the index says is a name beside it, and never a command."""
        return beside(self.base, self.shards[shard].url) if self.base else str(self.path(shard))

    def read(self, shard: int) -> Documents:
        """Return a shard's documents, or none and the reason where `data.on_error` skips it."""
        try:
            return Documents(read_shard(self, shard))
        except (ValueError, OSError) as error:
            return self.reading.skipped(redacted(self.url(shard)), error)

    def content(self, shard: int) -> bytes:
        """Return a shard's bytes, unchecked."""
        return self.reading.content(self.url(shard), self._stat(shard), lambda content: None)

    def fetch_ahead(self, shard: int) -> None:
        """Begin to bring a shard near."""
        self.reading.fetch_ahead(self.url(shard), self._stat(shard))

    def _stat(self, shard: int) -> Stat:
        info = self.shards[shard]
        return Stat(info.bytes, info.sha256)


def beside(url: str, name: str) -> str:
    """Return the URL of `name` in the folder of `url`; a query (a signature) goes along."""
    path, mark, query = url.partition("?")
    return f"{path.rpartition('/')[0]}/{name}{mark}{query}"


def load_index(path: str | Path, patience: Patience = PATIENT) -> ShardIndex:
    """Read `index.json`, given by its own path or URL, or its folder's."""
    if is_remote(str(path)):
        url = str(path)
        if not url.partition("?")[0].endswith(".json"):
            url = beside(f"{url.rstrip('/')}/", INDEX_NAME)
        return _parse(b"".join(chunks(url, patience)), redacted(url), base=url, folder=Path())
    path = Path(path)
    if path.is_dir():
        path = path / INDEX_NAME
    if not path.is_file():
        raise ValueError(f"{path} does not exist; write the shards with `roformer shards`")
    return _parse(path.read_bytes(), str(path), base="", folder=path.parent)


def _parse(content: bytes, path: str, *, base: str, folder: Path) -> ShardIndex:
    try:
        fields = json.loads(content)
        if not isinstance(fields, dict):
            raise ValueError("not an object")
        fields |= {"base": base, "folder": folder, "reading": Reading()}
        fields["sha256"] = sha256(content).hexdigest()
        index = ShardIndex.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path}: not an index of shards: {place}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not an index of shards: {error}") from None
    for name in ("docs", "tokens"):
        total, parts = getattr(index, name), sum(getattr(s, name) for s in index.shards)
        if total != parts:
            raise ValueError(f"{path}: {name} is {total}, but its shards add up to {parts}")
    if len({shard.url for shard in index.shards}) < len(index.shards):
        raise ValueError(f"{path}: lists a shard twice")
    return index


def read_shard(index: ShardIndex, shard: int) -> list[np.ndarray]:
    """Return a shard's documents, arrays of `index.dtype`, in file order.

    The whole file is read and its size and sha256 compared first, so no damage goes unnoticed.
    """
    info, url = index.shards[shard], index.url(shard)

    def check(content: bytes) -> str | None:
        problem = next(_file_problems(info, content), None)
        return problem and f"{problem}; `roformer verify` tells more"

    content = index.reading.content(url, index._stat(shard), check)
    name = redacted(url)
    documents = [ids for _, ids in read_arrays(content, index.dtype, name)]
    for problem in _count_problems(info, documents):
        raise ValueError(f"{name}: {problem}")
    return documents


def read_arrays(content: bytes, dtype: str, name: str) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (key, ids) of each member of the tar `content`; `ids` are views into it.

    Any structural fault is an ArchiveError that starts with `name` and says at which byte.
    """
    expected = np.dtype(dtype).newbyteorder("<")
    for member in read_tar(Memory(content), name):
        key = MEMBER_NAME.fullmatch(member.name)
        if key is None:
            raise ArchiveError(
                f"{name}: byte {member.offset}: the member is not a document, NUMBER.npy"
            )
        try:
            yield int(key[1]), parse_array(member.content, expected)
        except ValueError as error:
            raise ArchiveError(f"{name}: document {key[1]}: {error}") from None


def parse_array(content: bytes | memoryview, dtype: np.dtype) -> np.ndarray:
    """Return the ids in a .npy file as `numpy.save` writes it; a ValueError where it is none."""
    header = ARRAY_HEADER.match(content)
    if header is None or header[1].decode() != dtype.str[1:]:
        raise ValueError(f"not an array of {dtype.name} ids")
    ids = np.frombuffer(content, dtype=np.uint8, offset=header.end())
    if ids.size != int(header[2]) * dtype.itemsize:
        raise ValueError(f"{ids.size} bytes of ids, its header says {int(header[2])} ids")
    return ids.view(dtype)


def verify(path: str | Path) -> list[str]:
    """Return what is wrong with an index and all of its shards, one line each."""
    try:
        index = load_index(path)
    except (ValueError, OSError) as error:
        return [str(error)]
    problems = [
        f"{redacted(index.url(shard))}: {problem}"
        for shard in range(len(index.shards))
        for problem in _shard_problems(index, shard)
    ]
    if index.base:
        return problems
    listed = {shard.url for shard in index.shards}
    strays = sorted(tar.name for tar in index.folder.glob("*.tar") if tar.name not in listed)
    return problems + [f"{index.folder / name}: not in {INDEX_NAME}" for name in strays]


def _shard_problems(index: ShardIndex, shard: int) -> Iterator[str]:
    info, path = index.shards[shard], redacted(index.url(shard))
    try:
        content = b"".join(chunks(index.url(shard), index.reading.patience))
    except (ValueError, OSError) as error:
        yield str(error).removeprefix(f"{path}: ")
        return
    yield from _file_problems(info, content)
    documents, last = [], -1
    try:
        for key, ids in read_arrays(content, index.dtype, str(path)):
            if key <= last:
                yield f"document {key:09d} stands after {last:09d}"
            last = key
            if ids.size and int(ids.max()) >= index.vocab_size:
                yield f"document {key:09d} has id {ids.max()}, vocab_size is {index.vocab_size}"
            documents.append(ids)
    except ValueError as error:
        yield str(error).removeprefix(f"{path}: ")
    else:
        yield from _count_problems(info, documents)


def _file_problems(info: ShardInfo, content: bytes) -> Iterator[str]:
    if len(content) != info.bytes:
        yield f"has {len(content)} bytes, {INDEX_NAME} says {info.bytes}"
    elif sha256(content).hexdigest() != info.sha256:
        yield f"its sha256 is not that of {INDEX_NAME}: damaged or replaced"


def _count_problems(info: ShardInfo, documents: list[np.ndarray]) -> Iterator[str]:
    tokens = sum(ids.size for ids in documents)
    if len(documents) != info.docs:
        yield f"has {len(documents)} documents, {INDEX_NAME} says {info.docs}"
    if tokens != info.tokens:
        yield f"has {tokens} tokens, {INDEX_NAME} says {info.tokens}"
