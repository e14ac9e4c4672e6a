"""Sections of the configuration that the data pipeline reads: `tokenizer`, `corpus`, `data`."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)


def _as_list(value: object) -> object:
    """Accept one source where a list of them is expected."""
    return [value] if isinstance(value, str) else value


Sources = Annotated[list[str], BeforeValidator(_as_list)]


class Section(BaseModel):
    """A frozen group of keys that refuses the ones it does not know."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, message) for what the types cannot express."""
        yield from ()


class TokenizerConfig(Section):
    """Which tokenizer turns text into ids."""

    kind: Literal["unigram", "bpe", "wordpiece", "bytes"] = "unigram"
    """SentencePiece unigram or BPE; WoBERT's words by jieba; or plain UTF-8 bytes, which need no
    model."""
    model: str = "tokenizer.model"
    """The SentencePiece model, or vocab.txt: written by `roformer tokenizer`, read by all else."""
    vocab_size: PositiveInt | None = 8000
    """Number of pieces, special and byte pieces included: how many to train, and how many the model
    must have. null takes the model's."""
    normalizer: Literal["nmt_nfkc", "nfkc", "identity"] = "nmt_nfkc"
    """What SentencePiece does to text: NFKC, and white space made plain; NFKC; or nothing at all,
    so that any text comes back from its ids."""
    sample_mchars: PositiveFloat | None = 50.0
    """Million characters to train on: a random sample of the lines of a larger corpus; null takes
    all, at some 30 bytes of memory a character."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """A trained tokenizer needs a file."""
        if self.kind != "bytes" and not self.model:
            yield "model", "is empty; name the model file, for instance tokenizer.model"
        least = {"unigram": 262, "bpe": 262, "wordpiece": 6, "bytes": 0}[self.kind]
        if self.vocab_size is not None and self.vocab_size < least:
            yield "vocab_size", f"{self.vocab_size} has no room for 256 bytes and 5 special pieces"


class CorpusConfig(Section):
    """Where the text is, and how it becomes shards."""

    train: Sources = []
    """Files (.txt, .jsonl, also .gz, .zst, .xz), folders of them and glob patterns."""
    eval: Sources = []
    """The held-out documents, in the same forms."""
    text_key: str = "text"
    """The key of a .jsonl line's text."""
    on_error: Literal["stop", "skip"] = "stop"
    """What a line that is no document, text that is not UTF-8 or a damaged file does: end the
    command with a message, or be left out and counted."""
    workers: NonNegativeInt = 0
    """Processes that tokenize; 0 takes every core."""
    shard_mib: PositiveFloat = 64.0
    """Size of a shard, in MiB, once there are more than `data.lanes` of them."""


class DataConfig(Section):
    """Which shards are trained on, and in what order."""

    train: str = ""
    """Training shards: index.json or its folder."""
    eval: str | None = None
    """Held-out shards, likewise; none means no evaluation."""
    lanes: PositiveInt = 64
    """Independent streams that fix the order of samples, whatever the machine."""
    workers: NonNegativeInt = 0
    """Loader processes per rank; 0 reads in the training process."""
