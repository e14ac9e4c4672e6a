from data_pipeline.lanes import Cursor
from data_pipeline.reading import Fault
from trainer.state import TrainState


def test_what_is_left_out_counts_once_a_shard_however_often_it_is_read():
    state = TrainState()
    whole, two = Fault("a.tar", 0, "cut"), Fault("b.tar", 2, "no text")
    assert state.count_skipped([whole, two, two]) == [whole, two]
    assert state.count_skipped([two, whole]) == []
    assert state.skipped == {
        "a.tar": {"shards": 1, "samples": 0},
        "b.tar": {"shards": 0, "samples": 2},
    }


def test_json_and_back():
    state = TrainState(step=3, tokens=8, rows=2, cursors={5: Cursor(1, 2, 3, 4)})
    state.count_skipped([Fault("a.tar", 0, "cut")])
    state.source_tokens["web"] = 8
    assert TrainState.from_json(state.to_json()) == state
    earlier = {k: v for k, v in state.to_json().items() if k not in ("skipped", "source_tokens")}
    assert TrainState.from_json(earlier).skipped == {}
