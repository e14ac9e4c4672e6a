"""Full rows, and the paper's: one piece of a document a row, and padding."""

from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.batch import collate, make_example
from data_pipeline.index import ShardIndex, read_shard
from data_pipeline.lanes import Cursor, Lane, Row, eval_rows
from data_pipeline.loader import open_stream
from data_pipeline.mixture import Mixture
from data_pipeline.specials import STANDARD
from data_pipeline.tokenizers import Tokenizer
from model.config import ModelConfig
from model.encoder import RoFormer
from trainer.config import ObjectiveConfig
from trainer.objectives import build_objective


def open_lane(index: ShardIndex, packing: str, cursor: Cursor | None = None) -> Lane:
    return Lane(
        index, seed=5, lane=1, lanes=4, cursor=cursor or Cursor(0, 0, 0, 0), packing=packing
    )


def pieces(rows: list[Row]) -> list[np.ndarray]:
    return [row.ids[: len(row.ids) - row.padding] for row in rows]


@pytest.mark.parametrize("seq_len", [16, 100, 512])
def test_packed_rows_are_full_and_tails_open_the_next(index: ShardIndex, seq_len: int) -> None:
    lane = open_lane(index, "packed")
    rows = [lane.next_row(seq_len) for _ in range(200)]
    real = sum(int((row.ids != STANDARD.pad).sum()) for row in rows)
    assert real / (200 * seq_len) >= 0.995
    assert real == 200 * seq_len  # it is all of it
    for before, after in pairwise(rows):
        # A document that a row's end cuts opens the next row, if all that is left is its [SEP].
        is_cut = before.ids[-1] != STANDARD.sep
        assert is_cut == (after.ids[0] != STANDARD.cls)
        assert sum(before.lengths) == seq_len
    firsts = [row.lengths[0] for row in rows[1:] if row.ids[0] != STANDARD.cls]
    assert seq_len == 512 or min(firsts) <= 2  # there are such tails


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(3, 300), min_size=1, max_size=4))
def test_padded_rows_hold_the_same_documents_one_piece_each(
    index: ShardIndex, seq_lens: list[int]
) -> None:
    lane, whole = open_lane(index, "padded"), open_lane(index, "packed")
    rows = [lane.next_row(seq_lens[turn % len(seq_lens)]) for turn in range(40)]
    for turn, (row, piece) in enumerate(zip(rows, pieces(rows), strict=True)):
        assert len(row.ids) == seq_lens[turn % len(seq_lens)]
        assert row.lengths == ((len(piece), row.padding) if row.padding else (len(piece),))
        assert (row.ids[len(piece) :] == STANDARD.pad).all()
        assert not (piece[1:] == STANDARD.cls).any()
        assert not (piece[:-1] == STANDARD.sep).any()
        if row.padding:  # only the end of a document leaves a row that is not full
            assert piece[-1] == STANDARD.sep
    joined = np.concatenate(pieces(rows))
    assert joined.tolist() == whole.next_row(len(joined)).ids.tolist()
    cut = len(rows) // 2
    again = open_lane(index, "padded", rows[cut].cursor)
    for turn, row in enumerate(rows[cut + 1 :], cut + 1):
        resumed = again.next_row(seq_lens[turn % len(seq_lens)])
        assert (resumed.ids.tolist(), resumed.cursor) == (row.ids.tolist(), row.cursor)


def test_padded_evaluation_sees_every_document_once(index: ShardIndex) -> None:
    documents = [ids for shard in range(len(index.shards)) for ids in read_shard(index, shard)]
    rows = list(eval_rows(index, seq_len=64, packing="padded"))
    assert all(len(row.ids) == 64 for row in rows)
    assert len(rows) == sum(-(-(len(ids) + 2) // 64) for ids in documents)
    assert sum(len(piece) for piece in pieces(rows)) == index.tokens + 2 * index.docs


def test_nothing_is_asked_of_padding(index: ShardIndex, tokenizer: Tokenizer) -> None:
    lane = open_lane(index, "padded")
    rows = [row for row in (lane.next_row(200) for _ in range(50)) if row.padding]
    assert rows
    for config, rate in ((ObjectiveConfig(kind="causal"), 0.15), (ObjectiveConfig(), 1.0)):
        objective = build_objective(config, tokenizer, 1, rate)
        for row in rows:
            piece, example = len(row.ids) - row.padding, objective(row)
            assert len(example.targets) > 0
            assert example.target_index.max() < piece
            assert (example.targets != STANDARD.pad).all()
            assert (example.input_ids[piece:] == STANDARD.pad).all()


def test_padding_changes_no_output(index: ShardIndex) -> None:
    config = ModelConfig(
        num_layers=2, hidden_size=32, num_heads=2, intermediate_size=64, dropout=0.0
    )
    torch.manual_seed(1)
    encoder = RoFormer(config, vocab_size=index.vocab_size).double().eval()
    lane = open_lane(index, "padded")
    rows = [row for row in (lane.next_row(120) for _ in range(20)) if row.padding]
    assert len(rows) > 3
    found = []
    for row in rows:
        batch = collate([make_example(row, row.ids, np.zeros(0, int), np.zeros(0, int))])
        (piece, _), ids, positions = batch.lengths, batch.input_ids, batch.positions
        with torch.no_grad():
            padded = encoder(ids, positions, batch.lengths)[:piece]
            alone = encoder(ids[:piece], positions[:piece], (piece,))
            seen = encoder(ids, positions, (len(ids),))[:piece]
        torch.testing.assert_close(padded, alone, rtol=0, atol=1e-12)
        found.append(float((seen - alone).abs().max()))
    assert min(found) > 1e-6  # were it not a piece of its own, it would be seen


def test_the_stream_is_padded_for_any_ranks_workers_and_stops(
    index: ShardIndex, tokenizer: Tokenizer
) -> None:
    mixture = Mixture(("",), (index,), (1.0,), packing="padded")
    objective = build_objective(ObjectiveConfig(), tokenizer, 1, 0.15)
    cursors: dict[int, Cursor] = {}

    def stream(rank: int, world: int, workers: int, count: int, first_row: int = 0) -> list[int]:
        examples = open_stream(
            mixture,
            seed=5,
            lanes=4,
            seq_len=90,
            rank=rank,
            world=world,
            workers=workers,
            first_row=first_row,
            cursors=cursors if first_row else {},
            transform=objective,
        )
        try:
            read = list(islice(examples, count))
        finally:
            examples.close()
        cursors.update({example.lane: example.cursor for example in read})
        return [example.digest for example in read]

    alone = stream(0, 1, 0, 24)
    assert stream(0, 1, 2, 24) == alone
    assert stream(0, 2, 0, 12) == alone[::2]
    assert stream(1, 2, 0, 12) == alone[1::2]
    cursors.clear()
    assert stream(0, 1, 0, 13) + stream(0, 1, 2, 11, first_row=13) == alone
