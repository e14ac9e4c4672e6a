from data_pipeline.index import load_index
from data_pipeline.lanes import START, Lane
from data_pipeline.mixture import as_mixture
from data_pipeline.provenance import documents_between


def test_documents_of_a_stretch_are_those_that_its_rows_are_made_of(tiny_shards):
    index = load_index(tiny_shards / "train")
    lanes, number = 4, 2
    lane = Lane(index, seed=3, lane=number, lanes=lanes)
    seen = []
    for _ in range(60):
        start = lane.cursor
        row = lane.next_row(96)
        named = list(
            documents_between(
                as_mixture(index), seed=3, lane=number, lanes=lanes, start=start, end=row.cursor
            )
        )
        assert len(named) == len(row.lengths)
        seen += named
    whole = list(
        documents_between(
            as_mixture(index), seed=3, lane=number, lanes=lanes, start=START, end=lane.cursor
        )
    )
    assert [s for n, s in enumerate(seen) if not n or seen[n - 1] != s] == whole
    assert lane.cursor.epoch > 0  # into the next epoch, too
    assert {source.key for source in whole} <= {f"{n:09d}" for n in range(60)}
    assert all(source.shard.endswith(".tar") for source in whole)
