"""Several sources: which row comes from which, exactly, wherever a run was stopped."""

from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.batch import Example, make_example
from data_pipeline.index import ShardIndex
from data_pipeline.lanes import Cursor, Row
from data_pipeline.loader import open_stream
from data_pipeline.mixture import Mixture

WEIGHTS = st.lists(st.floats(0, 9) | st.just(0.0), min_size=1, max_size=6).filter(
    lambda weights: sum(weights) > 0.01
)


def mixture(weights: list[float], source: ShardIndex | None = None) -> Mixture:
    names = tuple(f"s{number}" for number in range(len(weights)))
    return Mixture(names, (source,) * len(weights), tuple(weights))  # type: ignore[arg-type]


@given(weights=WEIGHTS, first=st.integers(0, 10**12), rows=st.integers(1, 3000))
@settings(max_examples=200)
def test_any_stretch_of_rows_has_each_sources_share(
    weights: list[float], first: int, rows: int
) -> None:
    shares = mixture(weights).shares(first, rows)
    assert sum(shares) == rows
    for weight, share in zip(weights, shares, strict=True):
        expected = rows * weight / sum(weights)
        assert abs(share - expected) <= 3 * np.log2(rows + 2)
        assert weight or not share


@given(weights=WEIGHTS, row=st.integers(0, 2**40))
def test_one_row_and_many_agree(weights: list[float], row: int) -> None:
    mix = mixture(weights)
    shares = mix.shares(row, 3)
    assert (
        shares
        == np.bincount([mix.source_of(row + n) for n in range(3)], minlength=len(weights)).tolist()
    )


def unmasked(row: Row) -> Example:
    return make_example(row, row.ids, row.ids[:0], row.ids[:0])


def run(
    data: Mixture, first: int, rows: int, cursors: dict[int, Cursor], world: int = 1
) -> list[Example]:
    """Return rows of the run in order, read by `world` ranks."""
    streams = [
        open_stream(
            data,
            seed=1,
            lanes=4,
            seq_len=40,
            rank=rank,
            world=world,
            workers=0,
            first_row=first,
            cursors=cursors,
            transform=unmasked,
        )
        for rank in range(world)
    ]
    return [next(streams[row % world]) for row in range(first, first + rows)]


STAGES = ({"s0": 3, "s1": 1, "s2": 1}, {"s0": 0, "s1": 2, "s2": 1}, {"s0": 1})


def run_stages(data: Mixture, stops: list[int], world: int) -> list[Example]:
    """Run three stages of 40 rows with weights of their own, stopped at some rows."""
    examples: list[Example] = []
    cursors: dict[int, Cursor] = {}
    for first, end in pairwise(sorted({0, 40, 80, 120, *stops})):
        part = run(data.weighed(STAGES[first // 40]), first, end - first, cursors, world)
        cursors |= {example.lane: example.cursor for example in part}
        examples += part
    return examples


def test_a_mixture_goes_on_exactly_on_any_ranks(index: ShardIndex) -> None:
    data = mixture([1, 1, 1], index)  # a repeated source: each has an order of its own
    whole = run_stages(data, [], 1)
    for stops, world in ([1, 39, 41, 77], 1), ([5, 90], 2), ([60], 4):
        again = run_stages(data, stops, world)
        assert [example.digest for example in again] == [example.digest for example in whole]
    sources = [example.lane // 4 for example in whole]
    assert [sources[:40].count(source) for source in range(3)] == pytest.approx([24, 8, 8], abs=1)
    assert [sources[40:80].count(source) for source in range(3)] == pytest.approx(
        [0, 27, 13], abs=1
    )
    assert set(sources[80:]) == {0}
    orders = [[e.digest for e in whole if e.lane // 4 == source][:8] for source in range(3)]
    assert len(set(map(tuple, orders))) == 3


def test_a_source_out_of_the_mixture_is_never_opened(
    index: ShardIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = index.model_copy(update={"folder": index.folder / "gone"})
    data = Mixture(("a", "b"), (index, broken), (1.0, 0.0))
    assert len(run(data, 0, 50, {})) == 50
    with pytest.raises(ValueError, match="gone"):
        run(data.weighed({"b": 1.0}), 0, 50, {})


def test_a_single_source_is_what_it_was(index: ShardIndex) -> None:
    plain = list(
        islice(
            open_stream(
                index,
                seed=1,
                lanes=4,
                seq_len=40,
                rank=0,
                world=1,
                workers=0,
                first_row=0,
                cursors={},
                transform=unmasked,
            ),
            50,
        )
    )
    data = Mixture(("a", "b"), (index, index), (1.0, 0.0))
    mixed = run(data, 0, 50, {})
    assert [example.digest for example in mixed] == [example.digest for example in plain]


def test_tokens_tell_epochs(index: ShardIndex) -> None:
    data = mixture([1.0], index)
    assert data.epochs(0, 3 * sum(index.sizes), 1, 4, {}) == 3.0
