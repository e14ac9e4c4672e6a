"""Shards built in parts, by many processes, killed at any moment: always the same bytes."""

import gzip
import json
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest

from data_pipeline import buckets, corpus, shards, spool, tokenizing
from data_pipeline.corpus import Document, read_documents, source_files
from data_pipeline.index import ShardIndex, load_index, read_shard, verify
from data_pipeline.shards import Building, Layout, plan_building, write_shards
from data_pipeline.tokenizers import BytesTokenizer
from data_pipeline.tokenizing import Encoder, EncoderPool

SMALL = {  # of everything many, in a text of some 100 kB
    (shards, "UNIT_BYTES"): 20_000,
    (shards, "BUCKET_BYTES"): 40_000,
    (corpus, "BLOCK_BYTES"): 3_000,
    (tokenizing, "BLOCK_BYTES"): 3_000,
    (spool, "PIECE_IDS"): 8_000,
    (buckets, "WAITING_BYTES"): 30_000,
}
ENCODER = Encoder(BytesTokenizer())
Unit = tuple[corpus.Span, ...]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for (module, name), value in SMALL.items():
        monkeypatch.setattr(module, name, value)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, documents: list[Document]) -> Path:
    """The same documents again and again, in files of every kind."""
    folder = tmp_path_factory.mktemp("text")
    lines = [json.dumps({"text": document.text}) + "\n" for document in documents]
    (folder / "a.jsonl").write_text("\n".join(lines))  # blank lines between
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[:40]).encode()))
    (folder / "c.txt").write_text(documents[5].text)
    (folder / "d.txt").write_text(documents[6].text)
    (folder / "e.jsonl").write_text("".join(lines[60:]).removesuffix("\n"))
    return folder


def plan(folder: Path, text: Path, min_shards: int = 9) -> Building:
    layout = Layout(seed=3, min_shards=min_shards, shard_mib=0.03)
    return plan_building(folder, source_files([str(text)]), ENCODER, layout)


def build(folder: Path, text: Path, workers: int = 1) -> ShardIndex:
    building = plan(folder, text)
    with building.locked(shared=False), EncoderPool(ENCODER, workers) as pool:
        building.tokenize(pool)
        building.write(workers=workers)
        return building.publish()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def whole(small: None, tmp_path: Path, text: Path) -> dict[str, bytes]:
    build(tmp_path / "whole", text)
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
    return contents(tmp_path / "whole")


def documents_of(index: ShardIndex) -> list[bytes]:
    return [
        bytes((ids - 5).astype("u1"))
        for shard in range(len(index.shards))
        for ids in read_shard(index, shard)
    ]


def test_every_document_is_there_once(whole: dict[str, bytes], tmp_path: Path, text: Path) -> None:
    building = plan(tmp_path / "whole", text)
    assert building.num_units > 8
    assert building.num_buckets > 3
    index = load_index(tmp_path / "whole")
    assert len(index.shards) > 9
    expected = [document.text.encode() for document in read_documents([str(text)])]
    assert sorted(documents_of(index)) == sorted(expected)
    assert verify(index.folder) == []


@pytest.mark.parametrize(("parts", "workers", "write_in_parts"), [(1, 2, 0), (3, 1, 0), (5, 2, 1)])
def test_parts_and_processes_change_nothing(
    whole: dict[str, bytes],
    tmp_path: Path,
    text: Path,
    parts: int,
    workers: int,
    write_in_parts: bool,
) -> None:
    folder = tmp_path / "again"
    for part in reversed(range(parts)):
        building = plan(folder, text)
        with building.locked(shared=True), EncoderPool(ENCODER, workers) as pool:
            building.tokenize(pool, part, parts)
    if write_in_parts:
        for part in range(parts):
            plan(folder, text).write(part, parts, workers=workers)
        assert plan(folder, text).missing_buckets == []
    building = plan(folder, text)
    assert building.missing_units == []
    with building.locked(shared=False):
        building.write(workers=workers)
        building.publish()
    assert contents(folder) == whole
    assert not building.place.path.exists()


def test_a_small_corpus_is_dealt_like_documents_from_memory(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ((corpus, "BLOCK_BYTES"), (spool, "PIECE_IDS"), (buckets, "WAITING_BYTES")):
        monkeypatch.setattr(*key, SMALL[key])
    build(tmp_path / "files", text, workers=2)
    read = read_documents([str(text)])
    write_shards(
        read, BytesTokenizer(), tmp_path / "memory", seed=3, min_shards=9, shard_mib=0.03, workers=1
    )
    files, memory = contents(tmp_path / "files"), contents(tmp_path / "memory")
    assert files == memory


def test_dealing_in_portions_is_balanced_too(
    whole: dict[str, bytes], tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "BUCKET_BYTES", 1 << 30)
    monkeypatch.setattr(buckets, "DEALT_TOGETHER", 20)
    index = build(tmp_path / "portions", text)
    expected = [document.text.encode() for document in read_documents([str(text)])]
    assert sorted(documents_of(index)) == sorted(expected)
    sizes = [info.tokens + 2 * info.docs for info in index.shards]
    assert max(sizes) - min(sizes) <= max(map(len, expected)) + 2


def build_until(changes: int, place: Path, text: Path) -> None:
    """Build, and be killed after so many changes to files."""
    left = changes

    def die(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        in_place = bool(arguments) and str(arguments[0]).startswith(str(place))
        if in_place and event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die)
    build(place / "train", text)


def test_a_kill_at_any_moment_loses_and_repeats_nothing(
    whole: dict[str, bytes], tmp_path: Path, text: Path
) -> None:
    place = tmp_path / "killed"
    place.mkdir()
    ended: list[int | None] = []
    for changes in range(2, 900, 5):
        process = get_context("fork").Process(target=build_until, args=(changes, place, text))
        process.start()
        process.join()
        ended.append(process.exitcode)
        if not process.exitcode:
            break
    assert ended[-1] == 0
    assert set(ended[:-1]) == {-signal.SIGKILL}
    assert len(ended) > 10
    assert contents(place / "train") == whole
    assert [path.name for path in place.iterdir()] == ["train"]


def test_what_is_done_is_not_done_again(
    whole: dict[str, bytes], tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "again"
    building = plan(folder, text)
    with building.locked(shared=True), EncoderPool(ENCODER, 1) as pool:
        building.tokenize(pool, 0, 2)
        half = building.missing_units
        assert 0 < len(half) < building.num_units

        def read(
            spans: tuple[corpus.Span, ...], on_error: corpus.OnError
        ) -> Iterator[corpus.Block]:
            seen.append(spans)
            return corpus.read_blocks(spans, on_error)

        seen: list[tuple[corpus.Span, ...]] = []
        monkeypatch.setattr(shards, "read_blocks", read)
        building.tokenize(pool)
        assert len(seen) == len(half)
    # Another text: only what has changed is tokenized again.
    status = (text / "c.txt").stat()
    seen.clear()
    try:
        os.utime(text / "c.txt", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        building = plan(folder, text)
        with building.locked(shared=False), EncoderPool(ENCODER, 1) as pool:
            building.tokenize(pool)
            building.write()
            building.publish()
    finally:
        os.utime(text / "c.txt", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert [any(span.path.endswith("c.txt") for span in spans) for spans in seen] == [True]
    assert contents(folder) == whole


def test_two_processes_do_not_publish_together(small: None, tmp_path: Path, text: Path) -> None:
    building, other = plan(tmp_path / "train", text), plan(tmp_path / "train", text)
    with building.locked(shared=True), other.locked(shared=True):
        with pytest.raises(ValueError, match=r"train\.building: another process is at work there"):
            with plan(tmp_path / "train", text).locked(shared=False):
                pass
    with other.locked(shared=False):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_bad_line_is_named_by_its_number_in_the_file(
    small: None, tmp_path: Path, text: Path
) -> None:
    lines = (text / "a.jsonl").read_text().splitlines(keepends=True)
    lines.insert(150, "[1]\n")
    bad = tmp_path / "bad.jsonl"
    bad.write_text("".join(lines))
    with pytest.raises(ValueError, match=r"bad\.jsonl:151: a list") as caught:
        build(tmp_path / "train", bad)
    assert "\n" not in str(caught.value)
    # What was tokenized before it waits for the line to be put right.
    assert len(list((tmp_path / "train.building").glob("*.json"))) > 2


def test_skipping_counts_what_is_left_out(small: None, tmp_path: Path, text: Path) -> None:
    lines = (text / "a.jsonl").read_bytes().splitlines(keepends=True)
    lines[20:20] = [b'{"text": "\xff"}\n', b'{"text": "\\ud800"}\n', b'{"text": " \\n"}\n', b"{\n"]
    (tmp_path / "bad.jsonl").write_bytes(b"".join(lines))
    compressed = gzip.compress((text / "e.jsonl").read_bytes())
    (tmp_path / "cut.jsonl.gz").write_bytes(compressed[: len(compressed) // 2])
    encoder = Encoder(BytesTokenizer(), skips_errors=True)
    layout = Layout(seed=3, min_shards=2, shard_mib=1)
    files = [str(tmp_path / name) for name in ("bad.jsonl", "cut.jsonl.gz")]
    building = plan_building(tmp_path / "train", files, encoder, layout)
    with building.locked(shared=False), EncoderPool(encoder, 1) as pool:
        building.tokenize(pool)
        census, errors = building.census(), building.errors()
        building.write()
        index = building.publish()
    assert (census.skipped, census.blank) == (4, 1)
    assert [error.partition(": ")[0].rpartition("/")[2] for error in errors] == [
        *("bad.jsonl:21", "bad.jsonl:22", "bad.jsonl:24"),
        "cut.jsonl.gz",
    ]
    assert 90 < index.docs == census.documents < 90 + 30
    assert sum(census.lengths) == census.documents
    stored = json.loads((index.folder / "index.json").read_text())["text"]
    assert (stored["bytes_per_token"], stored["unknown_rate"], stored["skipped"]) == (1.0, 0.0, 4)
    assert stored["bytes"] == index.tokens
