import numpy as np
import pytest

from data_pipeline.corpus import Document
from data_pipeline.masking import mask_tokens
from data_pipeline.seeding import generator
from data_pipeline.specials import NUM_SPECIALS, STANDARD
from data_pipeline.tokenizers import Tokenizer

ROW = 512
NUM_ROWS = 2200  # more than a million tokens
TOLERANCE = 0.003


@pytest.fixture(scope="module")
def stream(documents: list[Document], tokenizer: Tokenizer) -> np.ndarray:
    """Wrapped documents end to end, [NUM_ROWS, ROW]."""
    wrapped = [
        np.array([STANDARD.cls, *tokenizer.encode(document.text), STANDARD.sep])
        for document in documents
    ]
    return np.resize(np.concatenate(wrapped), (NUM_ROWS, ROW))


@pytest.mark.parametrize("whole_word", [True, False])
@pytest.mark.parametrize("rate", [0.15, 0.4])
def test_rates_over_a_million_tokens(
    stream: np.ndarray, tokenizer: Tokenizer, rate: float, whole_word: bool
) -> None:
    num_tokens = num_targets = num_masked = num_kept = 0
    for number, ids in enumerate(stream):
        masked, targets = mask_tokens(
            ids,
            (200, ROW - 200),
            tokenizer.word_starts(ids),
            generator(11, number),
            rate=rate,
            vocab_size=tokenizer.vocab_size,
            whole_word=whole_word,
        )
        is_special = ids < NUM_SPECIALS
        assert not is_special[targets].any()
        untouched = np.ones(ROW, dtype=bool)
        untouched[targets] = False
        assert (masked[untouched] == ids[untouched]).all()
        assert np.isin(masked[targets], [0, 1, 2, 3]).sum() == 0
        assert masked.max() < tokenizer.vocab_size
        num_tokens += ROW - is_special.sum()
        num_targets += len(targets)
        num_masked += (masked[targets] == STANDARD.mask).sum()
        num_kept += (masked[targets] == ids[targets]).sum()
    assert num_tokens > 10**6
    assert abs(num_targets / num_tokens - rate) < TOLERANCE
    assert abs(num_masked / num_targets - 0.8) < TOLERANCE
    # One random id in vocab_size - 5 is the old one.
    assert abs(num_kept / num_targets - 0.1 - 0.1 / (tokenizer.vocab_size - 5)) < TOLERANCE


def words_of(ids: np.ndarray, lengths: tuple[int, ...], tokenizer: Tokenizer) -> list[set[int]]:
    """Return the words of a row as sets of places, found one token at a time."""
    words: list[set[int]] = []
    firsts = {sum(lengths[:piece]) for piece in range(len(lengths))}
    for place, piece in enumerate(ids):
        text = "" if piece < NUM_SPECIALS else tokenizer.decode(np.array([ids[0], piece]))
        before = tokenizer.encode("x")  # what follows no space has no word-start mark
        starts = tokenizer.decode(np.array([before[-1], piece])).count(" ") > 0
        is_own = piece < NUM_SPECIALS or (place and ids[place - 1] < NUM_SPECIALS)
        if place in firsts or is_own or starts or not text.strip():
            words.append(set())
        words[-1].add(place)
    return words


def test_all_pieces_of_a_chosen_word_are_targets(stream: np.ndarray, tokenizer: Tokenizer) -> None:
    lengths = (100, 3, ROW - 103)
    num_long = num_chosen = 0
    split_without = 0
    for number, ids in enumerate(stream[:40]):
        words = words_of(ids, lengths, tokenizer)
        for whole_word in (True, False):
            _, targets = mask_tokens(
                ids,
                lengths,
                tokenizer.word_starts(ids),
                generator(5, number),
                rate=0.3,
                vocab_size=tokenizer.vocab_size,
                whole_word=whole_word,
            )
            chosen = set(targets.tolist())
            partly = sum(bool(word & chosen) and not word <= chosen for word in words)
            if whole_word:
                assert partly == 0
                num_long += sum(len(word) > 1 for word in words)
                num_chosen += sum(len(word) > 1 and word <= chosen for word in words)
            else:
                split_without += partly
    assert num_long > 500
    assert 0.2 < num_chosen / num_long < 0.4
    assert split_without > 500  # the negative control: words are cut when not asked for


def test_pieces_and_specials_end_words() -> None:
    """Without any word start a piece is one word between its special ids."""
    ids = np.array([2, 7, 7, 7, 3, 2, 7, 7, 7, 7])
    seen = set()
    for number in range(200):
        _, targets = mask_tokens(
            ids, (5, 3, 2), np.zeros(10, dtype=bool), generator(number), rate=0.5, vocab_size=9
        )
        seen.add(tuple(targets.tolist()))
    words = [(1, 2, 3), (6, 7), (8, 9)]
    assert seen == {
        tuple(place for word, is_in in zip(words, choice, strict=True) if is_in for place in word)
        for choice in np.ndindex(2, 2, 2)
    }


def test_the_generator_alone_decides_and_inputs_stay(
    stream: np.ndarray, tokenizer: Tokenizer
) -> None:
    ids = stream[0].copy()
    starts = tokenizer.word_starts(ids)
    kept = starts.copy()

    def draw(*key: int) -> list[list[int]]:
        pair = mask_tokens(ids, (ROW,), starts, generator(*key), rate=0.15, vocab_size=480)
        return [array.tolist() for array in pair]

    assert draw(1, 2) == draw(1, 2) != draw(1, 3)
    assert (ids == stream[0]).all()
    assert (starts == kept).all()


@pytest.mark.parametrize(("rate", "expected"), [(0.0, 0), (1.0, 3)])
def test_rates_at_the_ends(rate: float, expected: int) -> None:
    ids = np.array([2, 5, 6, 7, 3])
    starts = np.ones(5, dtype=bool)
    _, targets = mask_tokens(ids, (5,), starts, generator(1), rate=rate, vocab_size=9)
    assert len(targets) == expected
