"""SentencePiece vocabularies: unigram and BPE, with a byte for what has no piece.

The five special ids are control symbols, which encoding never produces: none can be written in a
text. With `normalizer: identity` any text comes back from its ids as it was.
"""

import io
import re
from collections.abc import Iterable
from hashlib import sha256
from typing import Any

import numpy as np
import sentencepiece
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from data_pipeline.config import TokenizerConfig
from data_pipeline.sampling import MAX_LINE_BYTES
from data_pipeline.specials import NUM_SPECIALS, STANDARD, Specials

# SentencePiece sums in the order of its threads, so another number of them is another model.
# Of 1, 2, 4 and 8, two are the fastest on two cores.
TRAINING_THREADS = 2
WORD_START = "▁"  # SentencePiece writes a space so
MODEL_TYPES = {1: "unigram", 2: "bpe"}


class SentencePieceTokenizer:
    """A SentencePiece model; a word is a piece with the word-start mark and those after it."""

    specials = STANDARD

    def __init__(self, model: bytes) -> None:
        """Load a model file's content; a ValueError says why it cannot be used."""
        if not model:  # which SentencePiece takes for a model without pieces
            raise ValueError("is empty")
        proto = ModelProto()
        try:
            proto.ParseFromString(model)
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (DecodeError, RuntimeError):
            raise ValueError("is no SentencePiece model, or a cut one") from None
        self.normalizer: str = proto.normalizer_spec.name  # the last field that is written
        self.kind = MODEL_TYPES.get(proto.trainer_spec.model_type, "")
        if not self.normalizer or not self.kind:
            raise ValueError("is no unigram or BPE model with a normaliser, or is cut")
        ids = [self._processor.piece_to_id(f"[{name.upper()}]") for name in Specials._fields]
        if ids != list(STANDARD) or not self._processor.is_control(STANDARD.mask):
            raise ValueError("does not have [PAD] [UNK] [CLS] [SEP] [MASK] as ids 0 to 4")
        self.sha256 = sha256(model).hexdigest()
        self.vocab_size: int = self._processor.vocab_size()
        every = range(self.vocab_size)
        pieces = [self._processor.id_to_piece(index) for index in every]
        self._is_byte = np.array([self._processor.is_byte(index) for index in every])
        self._starts_word = np.array([piece.startswith(WORD_START) for piece in pieces])
        self._starts_word[:NUM_SPECIALS] = True
        # Only an identity normaliser lets other white space than the space through, as bytes.
        self._is_break = np.isin(pieces, [f"<0x{byte:02X}>" for byte in b"\t\n\v\f\r"])
        self._mark = [self._processor.piece_to_id(f"<0x{b:02X}>") for b in WORD_START.encode()]

    def encode(self, text: str) -> np.ndarray:
        """Return the text's ids, int32 [N], without special ones."""
        try:
            if self.normalizer == "identity" and WORD_START in text:
                return self._encode_marks(text)
            ids: np.ndarray = self._processor.encode_as_numpy(text)
            return ids
        except RuntimeError:
            text.encode()  # a lone surrogate is a UnicodeEncodeError, which is a ValueError
            raise

    def _encode_marks(self, text: str) -> np.ndarray:
        """Spell the character that would stand for a space by its bytes."""
        parts = [self._processor.encode_as_numpy(part) for part in text.split(WORD_START)]
        mark = np.array(self._mark, dtype=np.int32)
        return np.concatenate([parts[0], *(array for part in parts[1:] for array in (mark, part))])

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of `ids`, as the model normalised it."""
        text: str = self._processor.decode(np.asarray(ids).tolist())
        return text

    def word_starts(self, ids: np.ndarray) -> np.ndarray:
        """Return bool [N]: whether an id starts a word; a special id is a word of its own."""
        starts = self._starts_word[ids]
        starts[:1] = True
        starts[1:] |= self.specials.among(ids[:-1])
        if self.normalizer == "identity":
            is_break = self._is_break[ids]
            starts[1:] |= is_break[:-1] & ~is_break[1:]
        return starts

    def count_unknown(self, ids: np.ndarray) -> int:
        """Return how many ids are [UNK], or bytes of characters that have no piece."""
        return int(np.count_nonzero(self._is_byte[ids] | (ids == self.specials.unk)))


def train_sentencepiece(config: TokenizerConfig, lines: Iterable[str]) -> bytes:
    """Return a model file's content, trained on `lines` in their order.

    Raises:
        ValueError: Which says in one line why SentencePiece gives up.
    """
    keep_spaces: dict[str, Any] = {"add_dummy_prefix": False, "remove_extra_whitespaces": False}
    model = io.BytesIO()
    num_characters = 0

    def counted() -> Iterable[str]:
        nonlocal num_characters
        for line in lines:
            num_characters += len(line)
            yield line

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(counted()),
            model_writer=model,
            model_type=config.kind,
            vocab_size=config.vocab_size,
            byte_fallback=True,
            normalization_rule_name=config.normalizer,
            **(keep_spaces if config.normalizer == "identity" else {}),
            max_sentence_length=MAX_LINE_BYTES,
            num_threads=TRAINING_THREADS,
            pad_id=STANDARD.pad,
            unk_id=STANDARD.unk,
            bos_id=STANDARD.cls,
            eos_id=STANDARD.sep,
            pad_piece="[PAD]",
            unk_piece="[UNK]",
            bos_piece="[CLS]",
            eos_piece="[SEP]",
            control_symbols=["[MASK]"],  # takes the first free id, which is 4
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(_reason(config, num_characters, str(error))) from None
    return model.getvalue()


def _reason(config: TokenizerConfig, num_characters: int, error: str) -> str:
    if most := re.search(r"too high .*<= (\d+)", error):
        return (
            f"tokenizer.vocab_size={config.vocab_size} is more than this corpus of "
            f"{num_characters} characters allows: at most {most[1]}"
        )
    if least := re.search(r"required_chars\. \d+ vs (\d+)", error):
        return (
            f"tokenizer.vocab_size={config.vocab_size} has no room for the corpus's characters, "
            f"the specials and 256 bytes: at least {least[1]}"
        )
    detail = error.rpartition("] ")[2] or error
    return f"SentencePiece cannot train on this corpus of {num_characters} characters: {detail}"
