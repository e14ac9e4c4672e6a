import json
import os
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline import tokenizing
from data_pipeline.corpus import Document
from data_pipeline.index import ShardIndex, load_index, read_shard, verify
from data_pipeline.shards import write_shards
from data_pipeline.tokenizers import BytesTokenizer, Tokenizer
from tests.data_pipeline.plain import read_plainly


def write(
    documents: Iterable[Document], tokenizer: Tokenizer, folder: Path, **options: Any
) -> ShardIndex:
    settings: dict[str, Any] = {"seed": 3, "min_shards": 14, "shard_mib": 64, "workers": 1}
    return write_shards(documents, tokenizer, folder, **(settings | options))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_plain_webdataset_reads_what_was_written(
    index: ShardIndex, documents: list[Document], tokenizer: Tokenizer
) -> None:
    read = read_plainly(index.path(shard) for shard in range(len(index.shards)))
    assert sorted(read) == [f"{ordinal:09d}" for ordinal in range(len(documents))]
    for ordinal, document in enumerate(documents):
        ids = read[f"{ordinal:09d}"]
        assert ids.dtype == np.uint16
        assert ids.tolist() == tokenizer.encode(document.text).tolist()


def test_the_index_says_what_is_there(
    index: ShardIndex, documents: list[Document], tokenizer: Tokenizer
) -> None:
    stored = json.loads((index.folder / "index.json").read_text())
    lengths = [len(tokenizer.encode(document.text)) for document in documents]
    assert (stored["docs"], stored["tokens"]) == (len(documents), sum(lengths))
    assert (stored["dtype"], stored["vocab_size"], stored["seed"]) == ("uint16", 480, 3)
    assert (stored["tokenizer_kind"], stored["tokenizer_sha256"]) == ("unigram", tokenizer.sha256)
    assert len(stored["shards"]) == 14
    for shard, info in enumerate(index.shards):
        ids = read_shard(index, shard)
        assert (len(ids), sum(map(len, ids))) == (info.docs, info.tokens)
    assert verify(index.folder) == verify(index.folder / "index.json") == []


@pytest.mark.parametrize("workers", [2, 3, 0])
def test_the_number_of_processes_changes_nothing(
    workers: int,
    index: ShardIndex,
    documents: list[Document],
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizing, "BLOCK_BYTES", 5000)  # several batches for each process
    write(documents, tokenizer, tmp_path / "again", workers=workers)
    assert contents(tmp_path / "again") == contents(index.folder)


def test_seed_and_order_change_the_bytes(
    index: ShardIndex, documents: list[Document], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    write(documents, tokenizer, tmp_path / "seed", seed=4)
    write(documents[::-1], tokenizer, tmp_path / "order")
    assert contents(tmp_path / "seed") != contents(index.folder)
    assert contents(tmp_path / "order") != contents(index.folder)


def test_documents_are_shuffled_over_balanced_shards(index: ShardIndex) -> None:
    keys: list[list[int]] = []
    lengths: list[int] = []
    for shard in range(len(index.shards)):
        with tarfile.open(index.path(shard)) as tar:
            keys.append([int(name.removesuffix(".npy")) for name in tar.getnames()])
        lengths.extend(len(ids) for ids in read_shard(index, shard))
    assert all(shard == sorted(shard) for shard in keys)
    # Neighbours in the corpus rarely share a shard, and no shard is a range of the corpus.
    owner = {key: shard for shard, members in enumerate(keys) for key in members}
    neighbours = sum(owner[key] == owner[key + 1] for key in range(len(owner) - 1))
    assert neighbours < len(owner) / 4
    sizes = [info.tokens + 2 * info.docs for info in index.shards]
    assert max(sizes) - min(sizes) <= max(lengths) + 2


def test_shards_grow_in_number_with_the_corpus(
    documents: list[Document], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    index = write(documents, tokenizer, tmp_path / "small", min_shards=1, shard_mib=0.02)
    assert 4 < len(index.shards) < 20
    assert all(info.bytes < 3 * 0.02 * 2**20 for info in index.shards)
    many = write(documents[:6], tokenizer, tmp_path / "tiny", min_shards=1, shard_mib=1e-6)
    assert len(many.shards) == 6
    assert write(documents, tokenizer, tmp_path / "one", min_shards=1).shards[0].docs == 90


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    class Wide(BytesTokenizer):
        vocab_size = 2**16 + 1

        def encode(self, text: str) -> np.ndarray:
            return np.array([2**16, len(text)], dtype=np.int32)

    index = write([Document("a", "xyz")], Wide(), tmp_path / "wide", min_shards=1)
    assert index.dtype == "uint32"
    assert [ids.tolist() for ids in read_shard(index, 0)] == [[2**16, 3]]
    assert verify(index.folder) == []


def test_documents_without_ids_are_kept(tmp_path: Path) -> None:
    class Mute(BytesTokenizer):
        def encode(self, text: str) -> np.ndarray:
            return np.zeros(0, dtype=np.int32)

    index = write([Document(str(n), "x") for n in range(4)], Mute(), tmp_path / "m", min_shards=4)
    assert (index.docs, index.tokens) == (4, 0)
    assert verify(index.folder) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_what_fails_leaves_nothing(
    workers: int, documents: list[Document], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    def broken() -> Iterator[Document]:
        yield from documents
        raise ValueError("x.jsonl:91: not JSON")

    folder = tmp_path / "new" / "train"
    for given, message in [
        (broken(), r"^x\.jsonl:91: not JSON$"),
        (documents[:13], r"^13 documents do not fill 14 shards.* data\.lanes to 13 or less"),
        ([], r"^no document to write into .*train"),
    ]:
        with pytest.raises(ValueError, match=message):
            write(given, tokenizer, folder, workers=workers)
        assert list(tmp_path.iterdir()) == []


def test_earlier_shards_are_replaced_but_nothing_else(
    documents: list[Document], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = tmp_path / "train"
    first = write(documents, tokenizer, folder)
    with pytest.raises(ValueError, match="documents do not fill"):
        write(documents[:3], tokenizer, folder)
    assert load_index(folder) == first
    assert write(documents, tokenizer, folder, min_shards=5) == load_index(folder) != first
    assert len(list(folder.iterdir())) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["train"]
    (folder / "notes.txt").write_text("mine")
    for taken in (folder, folder / "notes.txt"):
        with pytest.raises(ValueError, match="exists and holds other things than shards"):
            write(documents, tokenizer, taken)
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_named(
    documents: list[Document], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match=str(tmp_path)):
        write(documents, tokenizer, tmp_path / "train")
