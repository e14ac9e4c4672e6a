import gzip
import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from data_pipeline.corpus import Span, cut_into_units, keep_in, read_blocks, read_documents

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}
LINES = (
    b'{"key": "a", "text": "one"}\n\n{"id": 7, "text": "two"}\n{"text": "  "}\n{"text": "three"}'
)


def texts(*sources: object) -> list[str]:
    return [document.text for document in read_documents([str(source) for source in sources])]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_lines_and_files_plain_or_compressed(tmp_path: Path, suffix: str) -> None:
    lines = tmp_path / f"x.jsonl{suffix}"
    lines.write_bytes(COMPRESS[suffix](LINES))
    whole = tmp_path / f"y.txt{suffix}"
    whole.write_bytes(COMPRESS[suffix]("\ufeffvier\r\nfünf\n".encode()))
    documents = list(read_documents([str(tmp_path)]))
    assert [document.text for document in documents] == ["one", "two", "three", "vier\r\nfünf\n"]
    assert [document.key for document in documents] == ["a", "7", f"{lines}:5", str(whole)]


def test_several_frames_and_long_streams_are_read_whole(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{number} " * 3000}) + "\n" for number in range(300)]
    compress = zstandard.ZstdCompressor().compress
    path = tmp_path / "x.jsonl.zst"
    path.write_bytes(b"".join(compress("".join(part).encode()) for part in (lines[:9], lines[9:])))
    assert texts(path) == [f"{number} " * 3000 for number in range(300)]


def test_folders_and_patterns_are_sorted_and_links_followed(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "a.txt", "b/c/3.TXT", ".hidden/4.txt", "b/read.me"):
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "linked").symlink_to(tmp_path / "corpus" / "b")
    assert texts(tmp_path / "corpus") == ["a.txt", "b/1.txt", "b/2.txt", "b/c/3.TXT"]
    assert texts(tmp_path / "linked") == ["b/1.txt", "b/2.txt", "b/c/3.TXT"]
    assert texts(tmp_path / "corpus/b/*.txt", tmp_path / "corpus/a.txt") == [
        "b/1.txt",
        "b/2.txt",
        "a.txt",
    ]
    assert texts(tmp_path / "corpus/?") == ["b/1.txt", "b/2.txt", "b/c/3.TXT"]
    (tmp_path / "corpus" / "b" / "c" / "loop").symlink_to(tmp_path / "corpus")
    assert texts(tmp_path / "corpus") == ["a.txt", "b/1.txt", "b/2.txt", "b/c/3.TXT"]


def test_a_name_with_brackets_is_a_name_before_it_is_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("x")
    assert texts(tmp_path / "a[1].txt") == ["x"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": ', "x.jsonl:2: not JSON"),
        (b'{"text": "a"}\n\n[1]', "x.jsonl:3: a list"),
        (b'{"txt": "a"}', "x.jsonl:1: no 'text'"),
        (b'{"text": 3}', "x.jsonl:1: a int as 'text'"),
        (b'{"text": "a"}\n{"text": "\xff"}', "x.jsonl:2: not UTF-8: byte 0xff"),
        (b'{"text": "a\\ud800"}', "x.jsonl:1: lone surrogate at character 1"),
        (b"[" * 100_000, "x.jsonl:1: not JSON"),
        (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "x.jsonl:1: not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        texts(path)
    assert "\n" not in str(caught.value)


def test_invalid_utf8_in_a_text_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"fine\nfine\nf\xfcnf")
    with pytest.raises(ValueError, match=r"x\.txt:3: not UTF-8: byte 0xfc"):
        texts(path)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_a_cut_file_is_an_error(tmp_path: Path, suffix: str, keep: float) -> None:
    content = COMPRESS[suffix](b"".join(b"%d words " % number for number in range(5000)))
    path = tmp_path / f"x.txt{suffix}"
    path.write_bytes(content)
    assert len(texts(path)) == 1
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(ValueError, match=rf"x\.txt{suffix}: damaged {suffix} file"):
        texts(path)


def test_sources_that_hold_nothing_are_errors(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.pdf").write_text("x")
    for source, message in [
        ("missing.txt", "does not exist"),
        ("*.jsonl", "does not exist"),
        ("empty", "holds no text"),
        ("x.pdf", "is not a .txt or .jsonl file"),
    ]:
        with pytest.raises(ValueError, match=message):
            texts(tmp_path / source)


def test_spans_of_any_size_hold_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    lines = [b'{"text": "%s"}\n' % (b"x" * length) for length in (1, 30, 2, 2, 40, 1)] + [
        b"\n",
        b"[]",
    ]
    path.write_bytes(b"".join(lines))
    for size in range(1, 150):
        units = cut_into_units([str(path)], size)
        read: list[bytes] = []
        for unit in units:
            read += [line for block in read_blocks(unit) for line in block.lines]
        assert read == lines
        errors: list[str] = []
        for unit in units:
            for block in read_blocks(unit):
                list(block.documents("text", keep_in(errors)))
        assert errors == [f"{path}:8: a list, but each line must be an object"]


def test_units_keep_small_files_together_and_compressed_ones_whole(tmp_path: Path) -> None:
    paths = []
    for name, size in (("a.txt", 30), ("b.txt", 80), ("c.jsonl.gz", 500), ("d.jsonl", 250)):
        paths.append(str(tmp_path / name))
        Path(paths[-1]).write_bytes(b"x" * size)
    a, b, c, d = paths
    assert cut_into_units(paths, 100) == [
        (Span(a), Span(b)),
        (Span(c),),
        *((Span(d, start, min(start + 100, 250)),) for start in (0, 100, 200)),
    ]
