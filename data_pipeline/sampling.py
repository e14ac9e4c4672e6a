"""Lines of a corpus to train a tokenizer on: all of them, or a sample that fits into memory."""

import re
from collections import deque
from collections.abc import Iterable, Iterator

from data_pipeline.corpus import Document
from data_pipeline.seeding import generator

MAX_LINE_CHARS = 1024
MAX_LINE_BYTES = 4 * MAX_LINE_CHARS
# A training line: at most MAX_LINE_CHARS, ended by white space where the text has some.
TRAINING_LINE = re.compile(rf".{{1,{MAX_LINE_CHARS}}}(?!\S)|.{{1,{MAX_LINE_CHARS}}}")
RESERVED = "▅"  # SentencePiece leaves out every training line that has this character
MILLION = 10**6


class LineSample:
    """The lines of documents, in order; where they are too many, a random share of them.

    Each line has a random number, and is kept while that is under a threshold, which is halved
    whenever too much is kept: so a corpus of any size is read once, in bounded memory, and every
    line has the same chance. The same documents give the same sample.

    A line over SentencePiece's length limit would be left out by it without a word, and so would
    one that has the character it reserves: the first is split, the second has it replaced by a
    space. NUL, which no vocabulary needs, becomes a space too.
    """

    def __init__(self, documents: Iterable[Document], most_mchars: float | None = None) -> None:
        """Read all documents; keep at most so many million characters, None for all."""
        self.documents = self.characters = self.sampled = 0
        self._kept: deque[tuple[float, str]] = deque()
        most = float("inf") if most_mchars is None else most_mchars * MILLION
        threshold, rng = 1.0, generator(0)
        for document in documents:
            self.documents += 1
            self.characters += len(document.text)
            lines = split_lines(document.text)
            for line, number in zip(lines, rng.random(len(lines)).tolist(), strict=True):
                if number < threshold:
                    self._kept.append((number, line))
                    self.sampled += len(line)
            while self.sampled > most:
                threshold /= 2
                self._kept = deque(item for item in self._kept if item[0] < threshold)
                self.sampled = sum(len(line) for _, line in self._kept)

    def lines(self) -> Iterator[str]:
        """Yield the lines once; each is forgotten when the next is asked for."""
        while self._kept:
            yield self._kept.popleft()[1]


def split_lines(text: str) -> list[str]:
    """Return the lines of a text, none longer than MAX_LINE_CHARS."""
    lines: list[str] = TRAINING_LINE.findall(text.replace(RESERVED, " ").replace("\0", " "))
    return lines
