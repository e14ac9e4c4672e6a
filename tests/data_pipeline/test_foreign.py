"""Shards that others made: their texts, their damage, and what is left out by which policy."""

import gzip
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.batch import Example, make_example
from data_pipeline.cache import Cache
from data_pipeline.corpus import keep_in, read_documents
from data_pipeline.foreign import ForeignShards, first_document, is_foreign, open_foreign
from data_pipeline.lanes import Cursor, Lane, Row, eval_rows
from data_pipeline.loader import open_stream
from data_pipeline.reading import Documents, Fault, Reading
from data_pipeline.sources import Patience, SourceError
from data_pipeline.specials import STANDARD
from data_pipeline.tokenizers import BytesTokenizer
from tests.data_pipeline.server import Server, serving
from tests.data_pipeline.test_archive import COMPRESSIONS, DAMAGE, END, SHARD, make_tar
from tests.data_pipeline.test_index import npy

BYTES = BytesTokenizer()
HASTY = Patience(connect_s=2.0, read_s=0.3, retries=1, pause_s=0.01)


def texts(documents: Documents) -> list[str]:
    return [BYTES.decode(ids) for ids in documents.ids]


def opened(source: str, on_error: str = "stop", **options: object) -> ForeignShards:
    reading = Reading(on_error=on_error, patience=HASTY, **options)  # type: ignore[arg-type]
    return open_foreign(source, BYTES, "text", reading)


def shard_of(folder: Path, files: dict[str, bytes], name: str = "a.tar") -> str:
    path = folder / name
    path.write_bytes(make_tar(files))
    return str(path)


def record(text: str) -> bytes:
    return json.dumps({"id": 1, "text": text}).encode()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as server:
        yield server


# -- what is read --------------------------------------------------------------------------------


def test_every_kind_of_text(tmp_path: Path) -> None:
    source = shard_of(
        tmp_path,
        {
            "__info__.json": b"{}",
            "d/a.txt": "\ufeffplain é".encode(),
            "d/a.cls": b"3",
            "b.txt.gz": gzip.compress(b"packed"),
            "c.jpg": b"\xff\xd8",
            "c.json": record("of json"),
            "d.jsonl": record("first") + b"\n\n" + record("second") + b"\n",
            "e.json.gz": gzip.compress(record("of json.gz")),
            "f.JSON": record("in capitals"),
            "g.txt": b"text first",
            "g.json": b"no json",
            "h.npy": npy(BYTES.encode("ids").astype("<u2")),
            "i.txt": b" \n",
        },
    )
    assert texts(opened(source).read(0)) == [
        "plain é",
        "packed",
        "of json",
        "first",
        "second",
        "of json.gz",
        "in capitals",
        "text first",
        "ids",
    ]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_names_of_shards(tmp_path: Path, compression: str) -> None:
    suffix = {"tar": ".tar", "gz": ".tar.gz", "zst": ".tar.zst"}[compression]
    for number in range(3):
        content = make_tar({"a.txt": f"text {number}".encode()})
        (tmp_path / f"s-{number}{suffix}").write_bytes(COMPRESSIONS[compression](content))
    for source in (tmp_path, f"{tmp_path}/s-{{0..2}}{suffix}", f"{tmp_path}/*{suffix}"):
        assert is_foreign(str(source))
        shards = opened(str(source))
        assert [texts(shards.read(shard)) for shard in range(3)] == [
            [f"text {number}"] for number in range(3)
        ]
    (tmp_path / "index.json").touch()
    assert not is_foreign(str(tmp_path))
    assert not is_foreign("https://host/folder")


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.zip").touch()
    with pytest.raises(SourceError, match=r"a\.zip: is none of \.tar, "):
        opened(f"{tmp_path}/*")
    with pytest.raises(SourceError, match=r"b\.tar: No such file"):
        opened(f"{tmp_path}/b.tar")


def test_the_fingerprint_tells_other_shards(tmp_path: Path) -> None:
    source = shard_of(tmp_path, {"a.txt": b"one"})
    before = opened(source).sha256
    assert opened(source).sha256 == before
    assert open_foreign(source, BYTES, "body", Reading()).sha256 != before
    shard_of(tmp_path, {"a.txt": b"two"})
    assert opened(source).sha256 != before


# -- bad samples ---------------------------------------------------------------------------------

BAD = {
    "half a sample": ({"b.jpg": b"x"}, r"'b\.jpg': the sample has 'jpg', but no txt"),
    "a strange kind": ({"b.j\ng": b"x"}, r"'b\.j\\ng': the sample has 'j\\ng', but no txt"),
    "no key": ({"README": b"x"}, r"'README': is not of a sample"),
    "a hidden file": ({"._b.txt": b"x"}, r"'\._b\.txt': is not of a sample"),
    "apart": ({"a.cls": b"x"}, r"'a\.cls': stands there twice, or apart"),
    "not utf-8": ({"b.txt": b"x\xff"}, r"'b\.txt': 'utf-8' codec can't decode byte 0xff"),
    "a hole": ({"b.txt": b"x" + bytes(600)}, r"'b\.txt': a NUL at byte 1 of it"),
    "no json": ({"b.json": b"{"}, r"'b\.json': .*not JSON"),
    "no key in json": ({"b.json": b"{}"}, r"'b\.json': .*no 'text'"),
    "a bad line": ({"b.jsonl": record("x") + b"\n[]"}, r"'b\.jsonl': line 2: a list"),
    "cut gzip": ({"b.txt.gz": gzip.compress(b"text")[:-9]}, r"'b\.txt\.gz': "),
    "no gzip": ({"b.txt.gz": b"text"}, r"'b\.txt\.gz': Not a gzipped file"),
    "no array": ({"b.npy": b"text"}, r"'b\.npy': not an array"),
    "a hole in ids": ({"b.npy": npy(np.array([9, 0, 9], "<u2"))}, r"'b\.npy': holds the id 0"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_sample_stops_or_is_left_out(tmp_path: Path, bad: str) -> None:
    files, message = BAD[bad]
    files = {"a.txt": b"before", "c.txt": b"middle", **files, "d.txt": b"after"}
    source = shard_of(tmp_path, files)
    with pytest.raises(SourceError, match=rf"^{source}: byte \d+: {message}") as caught:
        opened(source).read(0)
    assert "\n" not in str(caught.value)
    skipped = opened(source, "skip_shard").read(0)
    assert len(skipped.ids) == 0
    assert skipped.fault == Fault(source, 0, str(caught.value))
    left = opened(source, "skip_sample").read(0)
    kept = [text for text in texts(left) if text != "x"]  # lines before a bad one are whole
    assert kept == ["before", "middle", "after"]
    assert left.fault == Fault(source, 1, str(caught.value))


def test_a_member_that_comes_twice(tmp_path: Path) -> None:
    first, second = make_tar({"a.txt": b"one"}), make_tar({"a.txt": b"two", "b.txt": b"three"})
    path = tmp_path / "a.tar"
    path.write_bytes(first[:1024] + second)
    with pytest.raises(SourceError, match=r"byte 1024: 'a\.txt': stands there twice"):
        opened(str(path)).read(0)
    left = opened(str(path), "skip_sample").read(0)
    assert texts(left) == ["one", "three"]
    assert left.fault is not None
    assert left.fault.samples == 1


# -- damaged archives, by every way they come ------------------------------------------------------


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_through_file_http_and_pipe(
    tmp_path: Path, server: Server, damage: str
) -> None:
    content, message = DAMAGE[damage]
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    cache = Cache(tmp_path / "cache", 10**7, HASTY)
    for source, options in (
        (str(path), {}),
        (server.url("ok", "a.tar"), {}),
        (server.url("plain", "a.tar"), {"cache": cache}),
        (f"pipe:cat {path}", {}),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            opened(source, **options).read(0)
        said = str(caught.value)
        assert "a.tar" in said
        assert "hunter" not in said
        assert "\n" not in said
        skipped = opened(source, "skip_shard", **options).read(0)
        assert len(skipped.ids) == 0
        assert skipped.fault is not None
        left = opened(source, "skip_sample", **options).read(0)
        assert left.fault is not None
        assert texts(left) == texts(opened_whole(tmp_path))[: len(left.ids)]


def opened_whole(folder: Path) -> Documents:
    path = folder / "whole.tar"
    path.write_bytes(SHARD)
    return opened(str(path)).read(0)


def test_what_stood_before_a_cut_is_kept_by_skip_sample(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(SHARD[: END - 100])
    left = opened(str(path), "skip_sample").read(0)
    # the cut is in the sixth; the fifth may have had further members there
    assert texts(left) == texts(opened_whole(tmp_path))[:4]
    assert left.fault is not None
    assert left.fault.reason.endswith("what came before is kept")


def test_a_body_cut_without_a_word_is_found(tmp_path: Path, server: Server) -> None:
    (tmp_path / "a.tar").write_bytes(SHARD)
    half = len(SHARD) // 2
    with pytest.raises(ValueError, match=rf"a\.tar: .*byte {half}"):
        opened(server.url("closedelimited", "a.tar")).read(0)


def test_a_command_that_fails_is_the_reason_and_not_the_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(SHARD)
    for command in (f"head -c 700 {path}; false", f"cat {path}; false", "false"):
        with pytest.raises(SourceError, match="exit status") as caught:
            opened(f"pipe:{command}").read(0)
        assert "\n" not in str(caught.value)


# -- in lanes ------------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    rng = np.random.default_rng(5)
    for shard in range(5):
        files = {
            f"{shard}-{number}.txt": f"text {shard} {number} ".encode() * int(rng.integers(1, 9))
            for number in range(7)
        }
        shard_of(tmp_path, files, f"s-{shard}.tar")
    return f"{tmp_path}/s-{{0..4}}.tar"


def unmasked(row: Row) -> Example:
    return make_example(row, row.ids, row.ids[:0], row.ids[:0])


def run(shards: ForeignShards, cursors: dict[int, Cursor], first: int, rows: int) -> list[Example]:
    stream = open_stream(
        shards,
        seed=1,
        lanes=4,
        seq_len=48,
        rank=0,
        world=1,
        workers=0,
        first_row=first,
        cursors=cursors,
        transform=unmasked,
    )
    return list(islice(stream, rows))


@pytest.mark.parametrize("stop", [1, 17, 60])
def test_a_run_goes_on_exactly(corpus: str, stop: int) -> None:
    whole = run(opened(corpus), {}, 0, 120)
    assert max(example.cursor.epoch for example in whole) > 1
    cursors = {example.lane: example.cursor for example in whole[:stop]}
    rest = run(opened(corpus), cursors, stop, 120 - stop)
    assert [example.digest for example in rest] == [example.digest for example in whole[stop:]]


def test_held_out_texts_come_once(corpus: str) -> None:
    ids = [token for row in eval_rows(opened(corpus), seq_len=50) for token in row.ids.tolist()]
    assert ids.count(STANDARD.cls) == ids.count(STANDARD.sep) == 35


def test_what_is_left_out_is_told_whatever_stops(tmp_path: Path, corpus: str) -> None:
    (tmp_path / "s-1.tar").write_bytes(SHARD[:1100])
    shard_of(tmp_path, {"a.txt": b"fine", "b.txt": b"\xff", "c.jpg": b"", "d.txt": b"x"}, "s-3.tar")
    shards = opened(corpus, "skip_sample")
    for stops in ([], [1, 2, 3, 50], [30, 31, 90]):
        cursors: dict[int, Cursor] = {}
        faults = set()
        for first, end in zip([0, *stops], [*stops, 150], strict=True):
            for example in run(shards, cursors, first, end - first):
                cursors[example.lane] = example.cursor
                faults |= {(fault.shard, fault.samples) for fault in example.faults}
        assert faults == {(f"{tmp_path}/s-1.tar", 0), (f"{tmp_path}/s-3.tar", 2)}


def test_where_nothing_is_left_it_says_so(tmp_path: Path) -> None:
    source = shard_of(tmp_path, {"a.jpg": b"x"})
    empty = shard_of(tmp_path, {}, "empty.tar")
    lane = Lane(opened(source, "skip_shard"), seed=0, lane=0, lanes=1)
    with pytest.raises(ValueError, match=rf"^{source} holds no document: .*a\.jpg"):
        lane.next_row(8)
    lane = Lane(opened(empty), seed=0, lane=0, lanes=1)
    with pytest.raises(ValueError, match=rf"^{empty} holds no document$"):
        lane.next_row(8)
    for shards in (opened(source, "skip_sample"), opened(empty)):
        with pytest.raises(SourceError, match="holds no document; take it out"):
            first_document(shards)
    with pytest.raises(SourceError, match=r"'a\.jpg'"):
        first_document(opened(source))


# -- as a corpus ---------------------------------------------------------------------------------


def test_a_corpus_may_be_tars_wherever_they_are(tmp_path: Path, server: Server) -> None:
    files = {
        "a.txt": b"plain",
        "b.json": record("of\njson").replace(b",", b",\n"),
        "c.jsonl": record("first") + b"\n\n" + record("second"),
        "d.txt.gz": gzip.compress(b"packed"),
    }
    path = shard_of(tmp_path, files)
    expected = ["plain", "of\njson", "first", "second", "packed"]
    for source in (path, str(tmp_path), server.url("ok", "a.tar"), f"pipe:cat {path}"):
        assert [document.text for document in read_documents([source])] == expected
    with pytest.raises(ValueError, match=r"x\.jsonl is not a \.tar of texts"):
        list(read_documents([server.url("ok", "x.jsonl")]))


def test_a_corpus_of_damaged_tars_stops_or_counts(tmp_path: Path) -> None:
    files = {"a.txt": b"fine", "b.txt": b"\xff", "c.json": b"[]", "d.jpg": b"", "e.txt": b"last"}
    path = shard_of(tmp_path, files)
    with pytest.raises(ValueError, match=rf"^{path}: byte 1024: 'b\.txt':1: not UTF-8"):
        list(read_documents([path]))
    errors: list[str] = []
    assert [d.text for d in read_documents([path], "text", keep_in(errors))] == ["fine", "last"]
    assert [error.partition(": ")[2][:20] for error in errors] == [
        "byte 1024: 'b.txt':1",
        "byte 2048: 'c.json':",
        "byte 3072: 'd.jpg': ",
    ]
    Path(path).write_bytes(SHARD[:2000])
    with pytest.raises(ValueError, match=r"cut at byte 2000"):
        list(read_documents([path]))
