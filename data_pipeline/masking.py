"""Whole-word masking for masked language modelling (BERT's 15%, 80/10/10).

T = tokens, N = targets.
"""

import numpy as np

from data_pipeline.specials import STANDARD, Specials

MASKED_SHARE = 0.8
RANDOM_SHARE = 0.1  # the remaining tenth is kept as it is


def mask_tokens(
    ids: np.ndarray,
    lengths: tuple[int, ...],
    word_starts: np.ndarray,
    rng: np.random.Generator,
    *,
    rate: float,
    vocab_size: int,
    whole_word: bool = True,
    specials: Specials = STANDARD,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (input ids [T] with masks, target positions [N], ascending).

    Each word is chosen on its own with probability `rate`, so that is the expected share of
    tokens too, whatever the lengths of words. All tokens of a chosen word are targets; each then
    becomes [MASK], any other id that is not special, or stays. Special ids are never chosen. A
    piece's first token starts a word. Without `whole_word` every token is a word.
    """
    is_special = specials.among(ids)
    if whole_word:
        starts = word_starts | is_special
        starts[1:] |= is_special[:-1]
        starts[np.cumsum(lengths) - lengths] = True
        word = np.cumsum(starts) - 1
    else:
        word = np.arange(len(ids))
    is_chosen = (rng.random(len(ids)) < rate)[word]
    targets = np.flatnonzero(is_chosen & ~is_special)
    outcome = rng.random(len(targets))
    masked = ids.copy()
    masked[targets[outcome < MASKED_SHARE]] = specials.mask
    replaced = targets[(outcome >= MASKED_SHARE) & (outcome < MASKED_SHARE + RANDOM_SHARE)]
    masked[replaced] = specials.skip(rng.integers(vocab_size - len(specials), size=len(replaced)))
    return masked, targets
