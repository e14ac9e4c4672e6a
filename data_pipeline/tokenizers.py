"""Text to ids and back: SentencePiece (unigram, BPE) and plain UTF-8 bytes.

Every tokenizer has the same five special ids, and none of them can be written in a text: in a
SentencePiece model they are control symbols, which encoding never produces.
"""

import io
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import numpy as np
import sentencepiece

from data_pipeline.config import TokenizerConfig
from data_pipeline.corpus import Document

# SentencePiece sums in the order of its threads, so another number of them is another model.
# Of 1, 2, 4 and 8, two are the fastest on two cores.
TRAINING_THREADS = 2
NORMALIZER = "nmt_nfkc"
MAX_LINE_CHARS = 1024
MAX_LINE_BYTES = 4 * MAX_LINE_CHARS
# A training line: at most MAX_LINE_CHARS, ended by white space where the text has some.
TRAINING_LINE = re.compile(rf".{{1,{MAX_LINE_CHARS}}}(?!\S)|.{{1,{MAX_LINE_CHARS}}}")
WORD_START = "▁"
RESERVED = "▅"  # SentencePiece leaves out every training line that has this character


class Specials(IntEnum):
    """The ids that stand for no text, the same for every tokenizer."""

    PAD = 0
    UNK = 1
    CLS = 2
    SEP = 3
    MASK = 4


NUM_SPECIALS = len(Specials)


class Tokenizer(Protocol):
    """Turns text into ids; knows where words start."""

    @property
    def kind(self) -> str:
        """Which of the configuration's kinds this is."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""

    @property
    def sha256(self) -> str:
        """Fingerprint: equal ones give equal ids."""

    def encode(self, text: str) -> np.ndarray:
        """Return the text's ids, int32 [N], without special ones."""

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of `ids`; special ones stand for none."""

    def word_starts(self, ids: np.ndarray) -> np.ndarray:
        """Return bool [N]: whether an id starts a word; a special id is a word of its own."""

    def count_unknown(self, ids: np.ndarray) -> int:
        """Return how many ids stand for no piece of the vocabulary: [UNK], or a byte instead."""


class SentencePieceTokenizer:
    """A SentencePiece model; a word is a piece with the word-start mark and those after it."""

    def __init__(self, kind: str, model: bytes) -> None:
        """Load a model file's content; a ValueError says why it cannot be used."""
        if not model:  # which SentencePiece takes for a model without pieces
            raise ValueError("is empty")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise ValueError("is no SentencePiece model, or a cut one") from None
        if NORMALIZER.encode() not in model:  # its last field: without it, the rest still loads
            raise ValueError(f"has no {NORMALIZER} normaliser, or is cut")
        specials = [self._processor.piece_to_id(f"[{special.name}]") for special in Specials]
        if specials != list(Specials) or not self._processor.is_control(Specials.MASK):
            raise ValueError("does not have [PAD] [UNK] [CLS] [SEP] [MASK] as ids 0 to 4")
        self.kind = kind
        self.sha256 = sha256(model).hexdigest()
        self.vocab_size: int = self._processor.vocab_size()
        self._starts_word = np.array(
            [
                index < NUM_SPECIALS or self._processor.id_to_piece(index).startswith(WORD_START)
                for index in range(self.vocab_size)
            ]
        )
        self._is_unknown = np.array(
            [
                self._processor.is_unknown(index) or self._processor.is_byte(index)
                for index in range(self.vocab_size)
            ]
        )

    def encode(self, text: str) -> np.ndarray:
        """Return the text's ids, int32 [N], without special ones."""
        return self._processor.encode_as_numpy(text)

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of `ids`, as the model normalised it."""
        return self._processor.decode(np.asarray(ids).tolist())

    def word_starts(self, ids: np.ndarray) -> np.ndarray:
        """Return bool [N]: whether an id starts a word."""
        return _after_specials(self._starts_word[ids], ids)

    def count_unknown(self, ids: np.ndarray) -> int:
        """Return how many ids are [UNK], or bytes of characters that have no piece."""
        return int(np.count_nonzero(self._is_unknown[ids]))


class BytesTokenizer:
    """UTF-8 bytes, each its value plus the number of specials; white space parts words."""

    kind = "bytes"
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
        is_space = self._is_space[ids]
        starts = ids < NUM_SPECIALS
        starts[1:] |= is_space[:-1] & ~is_space[1:]
        return _after_specials(starts, ids)

    def count_unknown(self, ids: np.ndarray) -> int:
        """Return 0: every byte has its id."""
        return 0


def _after_specials(starts: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Let a word start at the first id and after each special one too."""
    starts[:1] = True
    starts[1:] |= ids[:-1] < NUM_SPECIALS
    return starts


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer of `config`; its vocabulary is what the model file says."""
    if config.kind == "bytes":
        return BytesTokenizer()
    path = Path(config.model)
    try:
        if not path.is_file():
            raise ValueError("does not exist")
        return SentencePieceTokenizer(config.kind, path.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"tokenizer.model: {path} {error}; train it with `roformer tokenizer`"
        ) from None


@dataclass(frozen=True, slots=True)
class TrainingSummary:
    """What a tokenizer was trained on, and what came of it."""

    model: Path | None
    """The file written; none for bytes, which need no model."""
    documents: int
    characters: int
    vocab_size: int
    sha256: str
    seconds: float


def train_tokenizer(config: TokenizerConfig, documents: Iterable[Document]) -> TrainingSummary:
    """Train the tokenizer of `config` and write its model file, whole or not at all.

    The same documents in the same order give the same file, whatever the machine.
    """
    if config.kind == "bytes":
        tokenizer = BytesTokenizer()
        return TrainingSummary(None, 0, 0, tokenizer.vocab_size, tokenizer.sha256, 0.0)
    started = time.monotonic()
    lines = _TrainingLines(documents)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type=config.kind,
            vocab_size=config.vocab_size,
            byte_fallback=True,
            normalization_rule_name=NORMALIZER,
            max_sentence_length=MAX_LINE_BYTES,
            num_threads=TRAINING_THREADS,
            pad_id=Specials.PAD,
            unk_id=Specials.UNK,
            bos_id=Specials.CLS,
            eos_id=Specials.SEP,
            pad_piece="[PAD]",
            unk_piece="[UNK]",
            bos_piece="[CLS]",
            eos_piece="[SEP]",
            control_symbols=["[MASK]"],  # takes the first free id, which is 4
            minloglevel=2,
        )
    except RuntimeError as error:
        if lines.error:
            raise lines.error from None
        raise ValueError(_reason(config, lines, str(error))) from None
    path = Path(config.model)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(model.getvalue())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    tokenizer_sha256 = sha256(model.getvalue()).hexdigest()
    return TrainingSummary(
        path,
        lines.num_documents,
        lines.num_characters,
        config.vocab_size,
        tokenizer_sha256,
        time.monotonic() - started,
    )


class _TrainingLines:
    """The lines of documents as SentencePiece takes them all, and a count of what went by.

    A line over its length limit would be left out without a word, and so would one that has
    the character it reserves: the first is split, the second has it replaced by a space. An error
    of the documents is kept, since SentencePiece makes one of its own of it.
    """

    def __init__(self, documents: Iterable[Document]) -> None:
        self._documents = documents
        self.num_documents = 0
        self.num_characters = 0
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            for document in self._documents:
                self.num_documents += 1
                self.num_characters += len(document.text)
                for line in TRAINING_LINE.finditer(document.text.replace(RESERVED, " ")):
                    yield line[0]
        except BaseException as error:
            self.error = error
            raise


def _reason(config: TokenizerConfig, lines: _TrainingLines, error: str) -> str:
    """Say in one line why SentencePiece gave up."""
    if lines.num_documents == 0:
        return "corpus.train holds no document to train the tokenizer on"
    if most := re.search(r"too high .*<= (\d+)", error):
        return (
            f"tokenizer.vocab_size={config.vocab_size} is more than this corpus of "
            f"{lines.num_characters} characters allows: at most {most[1]}"
        )
    if least := re.search(r"required_chars\. \d+ vs (\d+)", error):
        return (
            f"tokenizer.vocab_size={config.vocab_size} has no room for the corpus's characters, "
            f"the specials and 256 bytes: at least {least[1]}"
        )
    detail = error.rpartition("] ")[2] or error
    return f"SentencePiece cannot train on this corpus of {lines.num_documents} documents: {detail}"
