import io
import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_pipeline.index import ShardIndex, load_index, read_arrays, read_shard, verify
from tests.data_pipeline.plain import read_plainly


@pytest.fixture
def folder(index: ShardIndex, tmp_path: Path) -> Path:
    """A copy of the shards, to be damaged."""
    return Path(shutil.copytree(index.folder, tmp_path / "copy"))


def change_index(folder: Path, change: Callable[[Any], object]) -> None:
    path = folder / "index.json"
    stored = json.loads(path.read_text())
    change(stored)
    path.write_text(json.dumps(stored))


def trust(folder: Path, shard: int = 3) -> None:
    """Make the index agree with a shard's damaged bytes, so that only its structure tells."""
    content = (folder / f"shard-{shard:05d}.tar").read_bytes()
    facts = {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    change_index(folder, lambda stored: stored["shards"][shard].update(facts))


def flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def end_of_data(content: bytes) -> int:
    """Return where the end blocks begin."""
    return -(-len(content.rstrip(b"\0")) // 512) * 512


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "flipped in a header": lambda content: flip(content, 130),
    "flipped in a checksum": lambda content: flip(content, 150),
    "flipped in an array's header": lambda content: flip(content, 512 + 30),
    "cut in a header": lambda content: content[:300],
    "cut after a header": lambda content: content[:512],
    "cut in a payload": lambda content: content[:700],
    "cut between documents": lambda content: content[: 512 + 512 * second_block(content)],
    "cut in a later header": lambda content: content[: 812 + 512 * second_block(content)],
    "cut in the padding": lambda content: content[: 511 + 512 * second_block(content)],
    "no end blocks": lambda content: content[: end_of_data(content)],
    "one end block": lambda content: content[: end_of_data(content) + 512],
    "cut in the end blocks": lambda content: content[: end_of_data(content) + 1100],
    "a zeroed header": lambda content: (
        content[:512]
        + content[512 : 512 + 512 * second_block(content)]
        + bytes(512)
        + content[1024 + 512 * second_block(content) :]
    ),
    "zeroed from the start": lambda content: bytes(512) + content[512:],
    "a garbage header": lambda content: b"\xa5" * 512 + content[512:],
    "data after the end": lambda content: content[:-1] + b"x",
    "nothing": lambda content: b"",
}


def second_block(content: bytes) -> int:
    """Return how many blocks the first document's content takes."""
    return -(-int(content[124:135], 8) // 512)


@pytest.mark.parametrize("damage", DAMAGE)
def test_structural_damage_is_found_whatever_the_index_says(folder: Path, damage: str) -> None:
    path = folder / "shard-00003.tar"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    problems = verify(folder)
    assert problems
    assert all(problem.startswith(f"{path}: ") and "\n" not in problem for problem in problems)
    index = load_index(folder)
    assert len(read_shard(index, 2)) == index.shards[2].docs
    with pytest.raises(ValueError, match=r"shard-00003\.tar: .*`roformer verify`"):
        read_shard(index, 3)
    if path.stat().st_size == 0:
        return
    trust(folder)
    structural = verify(folder)
    assert len(structural) == 1
    assert not structural[0].endswith("replaced")
    with pytest.raises(ValueError, match=r"shard-00003\.tar: "):
        read_shard(load_index(folder), 3)


@pytest.mark.parametrize(
    "damage", ["cut between documents", "no end blocks", "a zeroed header", "cut in a later header"]
)
def test_webdataset_would_not_have_noticed(folder: Path, damage: str) -> None:
    """The negative control: reading in the ordinary way ends early and says nothing."""
    path = folder / "shard-00003.tar"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert 0 < len(read_plainly([path])) <= load_index(folder).shards[3].docs


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_flipped_bit_or_cut_is_found(index: ShardIndex, data: st.DataObject) -> None:
    content = index.path(0).read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    bit = data.draw(st.integers(0, 7))
    flipped = bytearray(content)
    flipped[place] ^= 1 << bit
    for damaged in (bytes(flipped), content[:place]):
        try:
            read = list(read_arrays(damaged, "uint16", "x"))
        except ValueError:
            continue
        # Only the ids themselves have no redundancy of their own: these, sha256 proves.
        assert damaged == bytes(flipped) or place >= end_of_data(content) + 1024
        assert [ids.shape for _, ids in read] == [ids.shape for ids in read_shard(index, 0)]


def test_every_flipped_byte_changes_the_sha256(folder: Path) -> None:
    path = folder / "shard-00000.tar"
    content = path.read_bytes()
    for at in (0, 512, 700, len(content) // 2, len(content) - 1):
        path.write_bytes(flip(content, at))
        assert any("sha256" in problem for problem in verify(folder))
    path.write_bytes(content)
    assert verify(folder) == []


def test_a_missing_or_unlisted_shard_is_found(folder: Path) -> None:
    (folder / "shard-00001.tar").rename(folder / "extra.tar")
    assert verify(folder) == [
        f"{folder}/shard-00001.tar: the shard is missing",
        f"{folder}/extra.tar: not in index.json",
    ]
    with pytest.raises(ValueError, match=r"shard-00001\.tar: the shard is missing"):
        read_shard(load_index(folder), 1)


@pytest.mark.parametrize(("name", "noun"), [("docs", "documents"), ("tokens", "tokens")])
def test_wrong_counts_are_found(folder: Path, name: str, noun: str) -> None:
    def move_one(stored: Any) -> None:
        stored["shards"][0][name] += 1
        stored["shards"][1][name] -= 1

    change_index(folder, move_one)
    problems = verify(folder)
    assert len(problems) == 2
    assert all(f"{noun}, index.json says" in problem for problem in problems)
    with pytest.raises(ValueError, match=f"{noun}, index.json says"):
        read_shard(load_index(folder), 0)
    change_index(folder, lambda stored: stored.update({name: stored[name] + 1}))
    assert "but its shards add up to" in verify(folder)[0]


def test_wrong_contents_are_found(folder: Path) -> None:
    change_index(folder, lambda stored: stored.update(dtype="uint32"))
    assert len(verify(folder)) == 14
    assert all("not an array of uint32 ids" in problem for problem in verify(folder))
    change_index(folder, lambda stored: stored.update(dtype="uint16", vocab_size=100))
    assert any("vocab_size is 100" in problem for problem in verify(folder))


def test_members_out_of_order_or_strange_are_found(folder: Path) -> None:
    index = load_index(folder)
    docs, shard = max((info.docs, shard) for shard, info in enumerate(index.shards))
    ids = read_shard(index, shard)
    for keys, name, message in [
        (range(docs, 0, -1), "npy", "stands after"),
        ([5] * docs, "npy", "000000005 stands after 000000005"),
        (range(docs), "pyd", "the member is not a document"),
    ]:
        with (
            open(index.path(shard), "wb") as file,
            webdataset.TarWriter(file, encoder=False, mtime=0) as writer,
        ):
            for key, array in zip(keys, ids, strict=True):
                writer.write({"__key__": f"{key:09d}", name: npy(array)})
        trust(folder, shard)
        assert message in "; ".join(verify(folder))


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an index of shards"),
        (b"[]", "not an object"),
        (b"\xff", "not an index of shards"),
        (b"{}", "shards: Field required"),
        (b'{"shards": []}', "shards: Tuple should have at least 1 item"),
        (b'{"shards": [{"url": 3}]}', r"shards\.0\.url: Input should be a valid string"),
    ],
)
def test_other_files_are_no_index(folder: Path, content: bytes, message: str) -> None:
    (folder / "index.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"index\.json: .*{message}") as caught:
        load_index(folder)
    assert "\n" not in str(caught.value)
    assert verify(folder) == [str(caught.value)]


def test_a_missing_index_says_how_to_make_one(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "index.json"):
        with pytest.raises(ValueError, match="does not exist; write the shards with `roformer sh"):
            load_index(path)
        assert len(verify(path)) == 1
