"""WoBERT's vocabulary: Chinese words, characters and Latin word pieces, a token a line.

jieba (without its hidden Markov model) cuts the text into words. A word of the vocabulary is one
id; any other falls into its Chinese characters and the runs between them, and these into pieces by
WordPiece. Ids are those of Hugging Face's RoFormerTokenizer, which uses the same two libraries.
Text is cleaned and put into small letters, so it does not come back as it was.
"""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256
from itertools import islice

import numpy as np

from data_pipeline.config import TokenizerConfig
from data_pipeline.specials import Specials

try:
    import rjieba
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
except ImportError:  # the group `chinese` is optional
    IS_INSTALLED = False
else:
    IS_INSTALLED = True

CONTINUES = "##"
UNKNOWN = "[UNK]"
COVERAGE = 0.9995  # of a corpus's characters, in a vocabulary that is trained here
REMEMBERED_WORDS = 1 << 18


class MissingPackages(ValueError):
    """What this kind needs is not installed."""


def require_packages() -> None:
    """Raise MissingPackages where the group `chinese` is not installed."""
    if not IS_INSTALLED:
        raise MissingPackages(
            "tokenizer.kind=wordpiece needs rjieba and tokenizers: pip install '.[chinese]'"
        )


class WordPieceTokenizer:
    """Words by jieba, and pieces of those that the vocabulary does not have."""

    kind = "wordpiece"
    normalizer = None

    def __init__(self, vocabulary: bytes) -> None:
        """Load a vocabulary file's content; a ValueError says why it cannot be used."""
        require_packages()
        try:
            text = vocabulary.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"is not UTF-8 at byte {error.start}") from None
        tokens = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
        if not text:
            raise ValueError("is empty")
        self._ids = {token: number for number, token in enumerate(tokens)}
        if len(self._ids) < len(tokens):
            line = next(n for n, token in enumerate(tokens) if self._ids[token] != n)
            raise ValueError(f"has {tokens[line]!r} of line {line + 1} in another line too")
        names = [f"[{name.upper()}]" for name in Specials._fields]
        if missing := [name for name in names if name not in self._ids]:
            raise ValueError(
                f"does not have {' '.join(missing)}: no WoBERT vocabulary, or a cut one"
            )
        self.specials = Specials(*(self._ids[name] for name in names))
        self.sha256 = sha256("\n".join(["wordpiece", *tokens]).encode()).hexdigest()
        self.vocab_size = len(tokens)
        self._tokens = tokens
        self._pieces = WordPiece(self._ids, unk_token=UNKNOWN)
        self._character = np.full(len(tokens), ord("\n"), dtype="<u4")
        for number, token in enumerate(tokens):
            if len(token) == 1 and _isolate(token) != token:
                self._character[number] = ord(token)
        self._starts_word = np.array([not token.startswith(CONTINUES) for token in tokens])
        self._ids_of = lru_cache(REMEMBERED_WORDS)(self._split)

    def __reduce__(self) -> tuple[type, tuple[bytes]]:
        return type(self), ("\n".join(self._tokens).encode(),)

    def encode(self, text: str) -> np.ndarray:
        """Return the text's ids, int32 [N], without special ones other than [UNK]."""
        text.encode()  # a lone surrogate is a UnicodeEncodeError, which is a ValueError
        ids = [number for word in cut_words(text) for number in self._ids_of(word)]
        return np.array(ids, dtype=np.int32)

    def _split(self, word: str) -> tuple[int, ...]:
        """Return the ids of a word."""
        if word in self._ids:
            return (self._ids[word],)
        parts = _isolate(word).split()
        return tuple(token.id for part in parts for token in self._pieces.tokenize(part))

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of `ids` in small letters, white space lost but between Latin words."""
        text = ""
        for number in np.asarray(ids).tolist():
            token = self._tokens[number]
            if token.startswith(CONTINUES):
                text += token.removeprefix(CONTINUES)
            elif number not in self.specials:
                is_parted = text[-1:].isascii() and text[-1:].isalnum() and token[0].isascii()
                text += " " + token if is_parted and token[0].isalnum() else token
        return text

    def word_starts(self, ids: np.ndarray) -> np.ndarray:
        """Return bool [N]: whether an id starts a word of jieba's; a special id is one alone.

        A word that the vocabulary has is one id. The others are found by cutting the runs of
        single characters again, as jieba did: the best way through a text is the best way
        through each part between two words. Only white space and [UNK] within a word mislead it.
        """
        starts = self._starts_word[ids]
        starts[:1] = True
        starts[1:] |= self.specials.among(ids[:-1])
        place = 0
        for word in rjieba.cut(self._character[ids].tobytes().decode("utf-32-le"), False):
            # One that the vocabulary has would have been one id.
            if len(word) > 1 and word not in self._ids:
                starts[place + 1 : place + len(word)] = False
            place += len(word)
        return starts

    def count_unknown(self, ids: np.ndarray) -> int:
        """Return how many ids are [UNK]."""
        return int(np.count_nonzero(ids == self.specials.unk))


def cut_words(text: str) -> list[str]:
    """Return the words of a text, cleaned and in small letters, white space included."""
    words: list[str] = rjieba.cut(_clean(text), False)
    return words


def train_wordpiece(config: TokenizerConfig, lines: Iterable[str]) -> bytes:
    """Return a vocabulary file's content: the commonest characters and words of `lines`.

    Raises:
        ValueError: If the text has too few of them, or too many characters.
    """
    require_packages()
    assert config.vocab_size is not None
    words = Counter(word for line in lines for word in cut_words(line) if not word.isspace())
    characters: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            characters[character] += count
    tokens = [f"[{name.upper()}]" for name in Specials._fields]
    left = COVERAGE * characters.total()
    for character, count in _ranked(characters):
        if left <= 0:
            break
        left -= count
        tokens.append(character)
        if _isolate(character) == character:
            tokens.append(CONTINUES + character)
    if len(tokens) > config.vocab_size:
        raise ValueError(
            f"tokenizer.vocab_size={config.vocab_size} has no room for the corpus's characters: "
            f"at least {len(tokens)}"
        )
    known = set(tokens)
    longer = (word for word, _ in _ranked(words) if word not in known and word.strip())
    tokens += islice(longer, config.vocab_size - len(tokens))
    if len(tokens) < config.vocab_size:
        raise ValueError(
            f"tokenizer.vocab_size={config.vocab_size} is more than this corpus of "
            f"{characters.total()} characters allows: at most {len(tokens)}"
        )
    return ("\n".join(tokens) + "\n").encode()


def _ranked(counter: Counter[str]) -> list[tuple[str, int]]:
    """Return items by falling count, equal ones by name."""
    return sorted(counter.items(), key=lambda item: (-item[1], item[0]))


def _clean(text: str) -> str:
    """Take away control characters and accents; small letters."""
    cleaned: str = CLEAN.normalize_str(text)
    return cleaned


def _isolate(text: str) -> str:
    """Put a space to both sides of each Chinese character."""
    isolated: str = ISOLATE.normalize_str(text)
    return isolated


if IS_INSTALLED:
    CLEAN = BertNormalizer(
        clean_text=True, handle_chinese_chars=False, strip_accents=None, lowercase=True
    )
    ISOLATE = BertNormalizer(
        clean_text=False, handle_chinese_chars=True, strip_accents=False, lowercase=False
    )
