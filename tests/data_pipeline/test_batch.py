import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.batch import Example, collate, make_example
from data_pipeline.lanes import START, Cursor, Row


def example(lengths: tuple[int, ...], lane: int = 0, end: int = 1, shift: int = 0) -> Example:
    ids = np.arange(10, 10 + sum(lengths)) + shift
    index = np.arange(0, len(ids), 3)
    row = Row(ids, lengths, lane, START, Cursor(0, 0, 0, end))
    return make_example(row, ids + 1, index, ids[index])


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), max_size=5))
def test_a_batch_is_its_rows_end_to_end(rows: list[list[int]]) -> None:
    examples = [example(tuple(lengths), lane=lane) for lane, lengths in enumerate(rows)]
    batch = collate(examples)
    flat = [length for lengths in rows for length in lengths]
    assert batch.lengths == tuple(flat)
    assert batch.num_tokens == sum(flat)
    assert batch.positions.tolist() == [place for length in flat for place in range(length)]
    # The id at every target is the one before the row's own change of all ids by one.
    assert (batch.input_ids[batch.target_index] - 1).tolist() == batch.targets.tolist()
    assert batch.num_targets == sum(len(row.targets) for row in examples)
    assert batch.digests == tuple(row.digest for row in examples)
    assert batch.cursors == {row.lane: row.cursor for row in examples}
    for tensor in (batch.input_ids, batch.positions, batch.target_index, batch.targets):
        assert tensor.dtype == torch.int64
        assert tensor.ndim == 1


def test_the_newest_cursor_of_a_lane_stays() -> None:
    batch = collate([example((3,), lane=4, end=3), example((3,), lane=4, end=6)])
    assert batch.cursors == {4: Cursor(0, 0, 0, 6)}
    assert batch.to("cpu").cursors == batch.cursors


def test_a_row_without_targets_is_fine() -> None:
    none = np.zeros(0, dtype=np.int64)
    row = Row(np.arange(4), (4,), 0, START, START)
    batch = collate([make_example(row, row.ids, none, none), example((2,))])
    assert batch.num_targets == 1
    assert batch.target_index.tolist() == [4]


def test_the_digest_sees_ids_labels_and_positions() -> None:
    row = Row(np.arange(4), (4,), 0, START, START)
    index = np.array([1])
    digests = [
        make_example(row, row.ids, index, np.array([9])).digest,
        make_example(row, row.ids + 1, index, np.array([9])).digest,
        make_example(row, row.ids, index, np.array([8])).digest,
        make_example(row, row.ids, index + 1, np.array([9])).digest,
        make_example(Row(row.ids, (2, 2), 0, START, START), row.ids, index, np.array([9])).digest,
    ]
    assert len(set(digests)) == len(digests)
    assert digests[0] == make_example(row, row.ids, index, np.array([9])).digest
    assert all(0 <= digest < 2**63 for digest in digests)
