import threading
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.index import ShardIndex, ShardInfo, read_shard
from data_pipeline.lanes import START, Cursor, Lane, deal, eval_rows
from data_pipeline.reading import Documents
from data_pipeline.specials import STANDARD


def fake_index(tokens: list[int]) -> ShardIndex:
    shards = tuple(
        ShardInfo(url=f"{shard}.tar", docs=1, tokens=number, bytes=1, sha256="0" * 64)
        for shard, number in enumerate(tokens)
    )
    return ShardIndex(
        folder=Path(),
        shards=shards,
        dtype="uint16",
        tokenizer_sha256="0" * 64,
        tokenizer_kind="bytes",
        vocab_size=261,
        docs=len(tokens),
        tokens=sum(tokens),
        seed=0,
        sha256="0" * 64,
    )


@given(
    tokens=st.lists(st.integers(0, 1000), min_size=1, max_size=40),
    seed=st.integers(0, 2**62),
    epoch=st.integers(0, 5),
    data=st.data(),
)
def test_dealing_gives_every_shard_once_and_evenly(
    tokens: list[int], seed: int, epoch: int, data: st.DataObject
) -> None:
    lanes = data.draw(st.integers(1, len(tokens)))
    index = fake_index(tokens)
    dealt = deal(index, seed, epoch, lanes)
    assert sorted(chain.from_iterable(dealt)) == list(range(len(tokens)))
    assert all(dealt)
    sizes = [sum(tokens[shard] + 2 for shard in shards) for shards in dealt]
    assert max(sizes) - min(sizes) <= max(tokens) + 2
    assert deal(fake_index(tokens), seed, epoch, lanes) == dealt


def test_each_epoch_and_seed_is_dealt_anew() -> None:
    index = fake_index([100] * 30)
    dealt = {deal(index, seed, epoch, 4) for seed in range(3) for epoch in range(3)}
    assert len(dealt) == 9


def epoch_tokens(index: ShardIndex) -> int:
    return index.tokens + 2 * index.docs


def take(lane: Lane, total: int, seq_lens: list[int]) -> tuple[list[int], list[Cursor]]:
    """Read at least `total` tokens in rows of `seq_lens`, in turn."""
    ids: list[int] = []
    cursors: list[Cursor] = []
    turn = 0
    while len(ids) < total:
        row = lane.next_row(seq_lens[turn % len(seq_lens)])
        turn += 1
        assert len(row.ids) == sum(row.lengths) == seq_lens[(turn - 1) % len(seq_lens)]
        assert row.ids.dtype == np.int64
        assert min(row.lengths) > 0
        assert row.start == (cursors[-1] if cursors else row.start)
        ids.extend(row.ids.tolist())
        cursors.append(row.cursor)
    return ids, cursors


@given(
    lane=st.integers(0, 7),
    seed=st.integers(0, 3),
    seq_lens=st.lists(st.integers(1, 700), min_size=1, max_size=5),
    stop=st.integers(0, 30),
    other=st.integers(1, 700),
)
@settings(max_examples=40, deadline=None)
def test_tokens_do_not_depend_on_row_lengths_or_stops(
    index: ShardIndex, lane: int, seed: int, seq_lens: list[int], stop: int, other: int
) -> None:
    total = 12_000  # more than two of a lane's epochs
    expected, _ = take(Lane(index, seed=seed, lane=lane, lanes=8), total, [4000])
    ids, cursors = take(Lane(index, seed=seed, lane=lane, lanes=8), total, seq_lens)
    assert ids[:total] == expected[:total]
    # A stop after any row, and another row length from there.
    stop = min(stop, len(cursors) - 1)
    read = sum(seq_lens[row % len(seq_lens)] for row in range(stop + 1))
    resumed = Lane(index, seed=seed, lane=lane, lanes=8, cursor=cursors[stop])
    rest, _ = take(resumed, max(total - read, 1), [other])
    assert (ids[:read] + rest)[:total] == expected[:total]


@pytest.mark.parametrize("lanes", [4, 14, 40, 200])
def test_an_epoch_holds_every_document_once(index: ShardIndex, lanes: int) -> None:
    """Also where shards, or even documents, are fewer than lanes."""
    stored = sorted(
        tuple(ids.tolist())
        for shard in range(len(index.shards))
        for ids in read_shard(index, shard)
    )
    orders = set()
    for epoch in range(2):
        read = []
        for number in range(lanes):
            lane = Lane(index, seed=5, lane=number, lanes=lanes, cursor=Cursor(epoch, 0, 0, 0))
            ids: list[int] = []
            while len((row := lane.next_row(64, last_epoch=epoch)).ids):
                ids.extend(row.ids.tolist())
            for document in split_documents(ids):
                read.append(tuple(document))
        assert sorted(read) == stored
        orders.add(tuple(read))
    assert len(orders) == 2


def split_documents(ids: list[int]) -> list[list[int]]:
    """Undo [CLS] ids [SEP] end to end."""
    documents: list[list[int]] = []
    for token in ids:
        if token == STANDARD.cls:
            documents.append([])
        elif token != STANDARD.sep:
            documents[-1].append(token)
    return documents


def test_pieces_are_documents(index: ShardIndex) -> None:
    lane = Lane(index, seed=1, lane=2, lanes=8)
    open_piece = False
    for _ in range(60):
        row = lane.next_row(100)
        for piece in np.split(row.ids, np.cumsum(row.lengths)[:-1]):
            assert (piece[0] == STANDARD.cls) != open_piece
            assert STANDARD.cls not in piece[1:]
            assert STANDARD.sep not in piece[:-1]
            open_piece = piece[-1] != STANDARD.sep


def test_one_shard_is_held_and_the_next_read_ahead(
    index: ShardIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[tuple[int, bool]] = []

    def record(index: ShardIndex, shard: int) -> Documents:
        reads.append((shard, threading.current_thread() is threading.main_thread()))
        return Documents(read_shard(index, shard))

    monkeypatch.setattr(ShardIndex, "read", record)
    lane = Lane(index, seed=0, lane=0, lanes=1)
    order = deal(index, 0, 0, 1)[0]
    while lane.cursor.shard < 4:
        lane.next_row(50)
    lane.next_row(50)
    assert [shard for shard, _ in reads[:5]] == list(order[:5])
    assert [in_main for _, in_main in reads[:5]] == [True] + 4 * [False]
    # A lane with a single shard keeps it from epoch to epoch.
    reads.clear()
    single = Lane(fake_single(index), seed=0, lane=0, lanes=1)
    while single.cursor.epoch < 3:
        single.next_row(500)
    assert len(reads) == 1


def fake_single(index: ShardIndex) -> ShardIndex:
    """Return the index with its first shard alone."""
    first = index.shards[0]
    return index.model_copy(update={"shards": (first,), "docs": first.docs, "tokens": first.tokens})


def test_an_error_of_reading_ahead_arrives(
    index: ShardIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = deal(index, 0, 0, 1)[0][1]

    def fail(index: ShardIndex, shard: int) -> Documents:
        if shard == second:
            raise ValueError("shard: damaged")
        return Documents(read_shard(index, shard))

    monkeypatch.setattr(ShardIndex, "read", fail)
    lane = Lane(index, seed=0, lane=0, lanes=1)
    while lane.cursor.shard == 0:
        lane.next_row(1)
    with pytest.raises(ValueError, match="shard: damaged"):
        lane.next_row(1)


@pytest.mark.parametrize("seq_len", [1, 64, 511, 10**6])
def test_held_out_documents_come_once_in_one_order(index: ShardIndex, seq_len: int) -> None:
    if seq_len == 1:
        index = fake_single(index)
    rows = list(eval_rows(index, seq_len=seq_len))
    assert [len(row.ids) for row in rows[:-1]] == [seq_len] * (len(rows) - 1)
    assert 0 < len(rows[-1].ids) <= seq_len
    ids = [token for row in rows for token in row.ids.tolist()]
    assert len(ids) == epoch_tokens(index)
    stored = [
        ids.tolist() for shard in range(len(index.shards)) for ids in read_shard(index, shard)
    ]
    assert sorted(split_documents(ids)) == sorted(stored)
    assert rows[0].start == START
    assert {row.lane for row in rows} == {-1}
    assert len({row.start for row in rows}) == len(rows)
    assert ids == [t for row in eval_rows(index, seq_len=97) for t in row.ids.tolist()]
