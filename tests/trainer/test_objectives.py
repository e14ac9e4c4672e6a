import numpy as np

from data_pipeline.config import TokenizerConfig
from data_pipeline.lanes import Cursor, Row
from data_pipeline.specials import NUM_SPECIALS, STANDARD
from data_pipeline.tokenizers import load_tokenizer
from trainer.config import ObjectiveConfig
from trainer.objectives import build_objective

TOKENIZER = load_tokenizer(TokenizerConfig(kind="bytes"))


START = Cursor(1, 2, 3, 4)


def make_row(lengths=(50, 30, 20), lane=3, start=START):
    ids = np.random.default_rng(0).integers(NUM_SPECIALS, TOKENIZER.vocab_size, sum(lengths))
    return Row(ids, lengths, lane, start, Cursor(1, 2, 5, 0))


def test_masked_examples_depend_on_seed_and_place_alone():
    def example(seed=5, **changes):
        return build_objective(ObjectiveConfig(), TOKENIZER, seed, 0.3)(make_row(**changes))

    assert example().digest == example().digest
    others = [
        example(seed=6),
        example(lane=4),
        example(start=Cursor(0, 2, 3, 4)),
        example(start=Cursor(1, 2, 3, 5)),
    ]
    assert len({example().digest, *(other.digest for other in others)}) == 5


def test_masked_targets_are_the_original_ids():
    row = make_row()
    example = build_objective(ObjectiveConfig(), TOKENIZER, 1, 0.4)(row)
    assert len(example.targets) > 0
    assert (example.targets == row.ids[example.target_index]).all()
    shown = example.input_ids[example.target_index]
    assert (shown == STANDARD.mask).any()
    untouched = np.setdiff1d(np.arange(len(row.ids)), example.target_index)
    assert (example.input_ids[untouched] == row.ids[untouched]).all()


def test_causal_asks_each_token_for_the_next_within_its_piece():
    row = make_row(lengths=(3, 1, 4))
    objective = build_objective(ObjectiveConfig(kind="causal"), TOKENIZER, 1, 0.15)
    example = objective(row)
    assert objective.causal
    assert example.target_index.tolist() == [0, 1, 4, 5, 6]
    assert (example.targets == row.ids[[1, 2, 5, 6, 7]]).all()
    assert (example.input_ids == row.ids).all()
