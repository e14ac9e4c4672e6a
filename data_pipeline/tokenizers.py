"""Text to ids and back. A kind is a class, and a line in TOKENIZERS.

unigram, bpe    SentencePiece          data_pipeline.sentencepieces
wordpiece       WoBERT's vocabulary    data_pipeline.wordpieces
bytes           plain UTF-8            here
"""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import numpy as np

from data_pipeline.config import TokenizerConfig
from data_pipeline.corpus import Document
from data_pipeline.sampling import LineSample
from data_pipeline.sentencepieces import SentencePieceTokenizer, train_sentencepiece
from data_pipeline.specials import NUM_SPECIALS, STANDARD, Specials
from data_pipeline.wordpieces import MissingPackages, WordPieceTokenizer, train_wordpiece


class Tokenizer(Protocol):
    """Turns text into ids; knows where words start."""

    @property
    def kind(self) -> str:
        """Which of the configuration's kinds this is."""

    @property
    def specials(self) -> Specials:
        """Its special ids; no text becomes one of them but [UNK]."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""

    @property
    def sha256(self) -> str:
        """Fingerprint: equal ones give equal ids."""

    def encode(self, text: str) -> np.ndarray:
        """Return the text's ids, int32 [N]; a lone surrogate is a ValueError."""

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of `ids`; special ones stand for none."""

    def word_starts(self, ids: np.ndarray) -> np.ndarray:
        """Return bool [N]: whether an id starts a word; a special id is a word of its own."""

    def count_unknown(self, ids: np.ndarray) -> int:
        """Return how many ids stand for no piece of the vocabulary: [UNK], or a byte instead."""


class BytesTokenizer:
    """UTF-8 bytes, each its value plus the number of specials; white space parts words."""

    kind = "bytes"
    specials = STANDARD
    vocab_size = NUM_SPECIALS + 256
    sha256 = sha256(b"id = byte + 5; 0..4 = pad, unk, cls, sep, mask").hexdigest()

    def __init__(self) -> None:
        self._is_space = np.zeros(self.vocab_size, dtype=bool)
        self._is_space[[NUM_SPECIALS + byte for byte in b" \t\n\v\f\r"]] = True

    def encode(self, text: str) -> np.ndarray:
        """Return the text's ids, int32 [N]."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) + NUM_SPECIALS

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of `ids`; bytes cut out of a character become U+FFFD."""
        ids = np.asarray(ids)
        values = (ids[ids >= NUM_SPECIALS] - NUM_SPECIALS).astype(np.uint8)
        return values.tobytes().decode(errors="replace")

    def word_starts(self, ids: np.ndarray) -> np.ndarray:
        """Return bool [N]: whether an id starts a word, the spaces after it included."""
        is_space, is_special = self._is_space[ids], self.specials.among(ids)
        starts = is_special.copy()
        starts[:1] = True
        starts[1:] |= is_space[:-1] & ~is_space[1:] | is_special[:-1]
        return starts

    def count_unknown(self, ids: np.ndarray) -> int:
        """Return 0: every byte has its id."""
        return 0


@dataclass(frozen=True)
class Kind:
    """How tokenizers of a kind are made; those without a model file need neither."""

    load: Callable[[bytes], Tokenizer]
    train: Callable[[TokenizerConfig, Iterable[str]], bytes]


SENTENCEPIECE = Kind(SentencePieceTokenizer, train_sentencepiece)
TOKENIZERS: dict[str, Kind | Callable[[], Tokenizer]] = {
    "unigram": SENTENCEPIECE,
    "bpe": SENTENCEPIECE,
    "wordpiece": Kind(WordPieceTokenizer, train_wordpiece),
    "bytes": BytesTokenizer,
}


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer of `config`, whose model file must be what the config says.

    Raises:
        ValueError: If it is another, or none at all.
    """
    kind = TOKENIZERS[config.kind]
    if not isinstance(kind, Kind):
        return kind()
    path = Path(config.model)
    try:
        if not path.is_file():
            raise ValueError("does not exist")
        tokenizer = kind.load(path.read_bytes())
    except MissingPackages:
        raise
    except ValueError as error:
        raise ValueError(
            f"tokenizer.model: {path} {error}; train it with `roformer tokenizer`"
        ) from None
    for key in ("kind", "vocab_size", "normalizer"):
        wanted, found = getattr(config, key), getattr(tokenizer, key, None)
        if None not in (wanted, found) and wanted != found:
            raise ValueError(
                f"tokenizer.model: {path} has {key} {found}, and the config says "
                f"tokenizer.{key}={wanted}: correct the config, or name another model"
            )
    return tokenizer


@dataclass(frozen=True, slots=True)
class TrainingSummary:
    """What a tokenizer was trained on, and what came of it."""

    model: Path | None
    """The file written; none for bytes, which need no model."""
    documents: int
    characters: int
    """Of all documents."""
    sampled: int
    """Characters that it was trained on."""
    vocab_size: int
    sha256: str
    seconds: float


def train_tokenizer(config: TokenizerConfig, documents: Iterable[Document]) -> TrainingSummary:
    """Train the tokenizer of `config` and write its model file, whole or not at all.

    The same documents in the same order give the same file, whatever the machine.
    """
    kind = TOKENIZERS[config.kind]
    if not isinstance(kind, Kind):
        tokenizer = kind()
        return TrainingSummary(None, 0, 0, 0, tokenizer.vocab_size, tokenizer.sha256, 0.0)
    if config.vocab_size is None:
        raise ValueError("tokenizer.vocab_size is null; say how many pieces to train")
    started = time.monotonic()
    sample = LineSample(documents, config.sample_mchars)
    if sample.documents == 0:
        raise ValueError("corpus.train holds no document to train the tokenizer on")
    model = kind.train(config, sample.lines())
    path = Path(config.model)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(model)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    trained = kind.load(model)
    return TrainingSummary(
        path,
        sample.documents,
        sample.characters,
        sample.sampled,
        trained.vocab_size,
        trained.sha256,
        time.monotonic() - started,
    )
