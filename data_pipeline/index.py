"""The index of a folder of shards: what is in each, and the fingerprints that prove it.

A shard is an ordinary WebDataset tar with one member `KEY.npy` per document: its token ids, a
one-dimensional array, without special ids. KEY is the document's ordinal in the corpus.
`index.json` stands beside the shards and is written last.
"""

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from data_pipeline.archive import read_members
from data_pipeline.specials import STANDARD, Specials

INDEX_NAME = "index.json"
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

    @property
    def specials(self) -> Specials:
        """The tokenizer's special ids."""
        return Specials(*self.special_ids)

    def path(self, shard: int) -> Path:
        """Return where a shard's file is."""
        return self.folder / self.shards[shard].url


def load_index(path: str | Path) -> ShardIndex:
    """Read `index.json`, given by its own path or its folder's."""
    path = Path(path)
    if path.is_dir():
        path = path / INDEX_NAME
    if not path.is_file():
        raise ValueError(f"{path} does not exist; write the shards with `roformer shards`")
    content = path.read_bytes()
    try:
        fields = json.loads(content)
        if not isinstance(fields, dict):
            raise ValueError("not an object")
        fields |= {"folder": path.parent, "sha256": sha256(content).hexdigest()}
        index = ShardIndex.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
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
    info, path = index.shards[shard], index.path(shard)
    content = _read(path)
    for problem in _file_problems(info, content):
        raise ValueError(f"{path}: {problem}; `roformer verify` tells more")
    documents = [ids for _, ids in read_members(content, index.dtype, str(path))]
    for problem in _count_problems(info, documents):
        raise ValueError(f"{path}: {problem}")
    return documents


def verify(path: str | Path) -> list[str]:
    """Return what is wrong with an index and all of its shards, one line each."""
    try:
        index = load_index(path)
    except (ValueError, OSError) as error:
        return [str(error)]
    problems = [
        f"{index.path(shard)}: {problem}"
        for shard in range(len(index.shards))
        for problem in _shard_problems(index, shard)
    ]
    listed = {shard.url for shard in index.shards}
    strays = sorted(tar.name for tar in index.folder.glob("*.tar") if tar.name not in listed)
    return problems + [f"{index.folder / name}: not in {INDEX_NAME}" for name in strays]


def _shard_problems(index: ShardIndex, shard: int) -> Iterator[str]:
    info, path = index.shards[shard], index.path(shard)
    try:
        content = _read(path)
    except (ValueError, OSError) as error:
        yield str(error).removeprefix(f"{path}: ")
        return
    yield from _file_problems(info, content)
    documents, last = [], -1
    try:
        for key, ids in read_members(content, index.dtype, str(path)):
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


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise ValueError(f"{path}: the shard is missing")
    return path.read_bytes()


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
