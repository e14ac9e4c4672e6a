"""What the model learns to predict: masked tokens, or the next one.

An objective is a row transform, run in the loader's processes, and a flag for attention; both kinds
share one loss, `model.loss`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from data_pipeline.batch import Example, make_example
from data_pipeline.lanes import Row
from data_pipeline.masking import mask_tokens
from data_pipeline.seeding import generator
from data_pipeline.tokenizers import Tokenizer
from trainer.config import ObjectiveConfig


class Objective(Protocol):
    """Makes examples of rows."""

    @property
    def causal(self) -> bool:
        """Whether attention looks back only."""
        ...

    def __call__(self, row: Row) -> Example:
        """Choose a row's targets."""
        ...


@dataclass(frozen=True)
class MaskedLanguageModeling:
    """Predict chosen words from both sides (BERT's objective, whole words)."""

    tokenizer: Tokenizer
    seed: int
    rate: float
    whole_word: bool
    causal: bool = False

    def __call__(self, row: Row) -> Example:
        """Mask words; the choice depends on the seed and the row's place in the corpus alone."""
        ids, targets = mask_tokens(
            row.ids,
            row.lengths,
            self.tokenizer.word_starts(row.ids),
            generator(self.seed, row.lane, *row.start),
            rate=self.rate,
            vocab_size=self.tokenizer.vocab_size,
            whole_word=self.whole_word,
            specials=self.tokenizer.specials,
        )
        return make_example(row, ids, targets, row.ids[targets])


@dataclass(frozen=True)
class CausalLanguageModeling:
    """Predict every token from those before it in its piece."""

    causal: bool = True

    def __call__(self, row: Row) -> Example:
        """Make every token but a piece's last, and padding, ask for the one after it."""
        is_last = np.zeros(len(row.ids), dtype=bool)
        is_last[np.cumsum(row.lengths) - 1] = True
        is_last[len(row.ids) - row.padding :] = True
        asking = np.flatnonzero(~is_last)
        return make_example(row, row.ids, asking, row.ids[asking + 1])


def build_objective(
    config: ObjectiveConfig, tokenizer: Tokenizer, seed: int, mask_rate: float
) -> Objective:
    """Make the objective of a stage."""
    return OBJECTIVES[config.kind](config, tokenizer, seed, mask_rate)


OBJECTIVES: dict[str, Callable[[ObjectiveConfig, Tokenizer, int, float], Objective]] = {
    "mlm": lambda config, tokenizer, seed, rate: MaskedLanguageModeling(
        tokenizer, seed, rate, config.whole_word
    ),
    "causal": lambda config, tokenizer, seed, rate: CausalLanguageModeling(),
}
