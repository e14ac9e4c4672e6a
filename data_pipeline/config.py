"""Sections of the configuration that the data pipeline reads: `tokenizer`, `corpus`, `data`."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
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


class SourceConfig(Section):
    """One of several sources of training, and its share."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_]*$")]
    """What stages and metrics call it."""
    shards: Annotated[str, Field(min_length=1)]
    """Where it is, in the forms of `data.train`."""
    weight: NonNegativeFloat = 1.0
    """Share of the rows, as a part of the sum of all weights; a stage's `mixture` overrides it."""


SourceOrSources = Annotated[
    Annotated[str, Tag("[str]")]
    | Annotated[list[SourceConfig], Tag("[list]"), Field(min_length=1)],
    Discriminator(lambda value: "[list]" if isinstance(value, list) else "[str]"),
]


Packing = Literal["packed", "padded"]


class DataConfig(Section):
    """Which shards are trained on, in what order, and how they are read."""

    train: SourceOrSources = ""
    """Training shards: index.json or its folder, a local path or a URL; or tars of text without an
    index (.tar, .tar.gz, .tar.zst): names with {000..099} or *, a folder, URLs, `pipe:COMMAND`. Or
    a list of such sources with weights."""
    eval: str | None = None
    """Held-out shards, in the same forms; none means no evaluation."""
    lanes: PositiveInt = 64
    """Independent streams that fix the order of samples, whatever the machine."""
    packing: Packing = "packed"
    """Documents one after another in full rows, or the paper's form, for comparison: each row one
    piece of one document, and padding. Steps and batches count rows alike, padding included."""
    workers: NonNegativeInt = 0
    """Loader processes per rank; 0 reads in the training process."""
    on_error: Literal["stop", "skip_shard", "skip_sample"] = "stop"
    """What damage does: stop the run; leave out the shard; leave out the sample alone, or the rest
    of an archive that is damaged (an indexed shard whole). What is left out is counted."""
    text_key: str = "text"
    """The key of the text in `json` and `jsonl` members of tars without an index."""
    cache_dir: str | None = None
    """Folder on each node for what comes over a network; null: one in the temporary folder."""
    cache_gib: PositiveFloat = 20.0
    """The most that it may hold, in GiB."""
    timeout_s: PositiveFloat = 60.0
    """Longest wait for the next bytes of a source."""
    retries: NonNegativeInt = 5
    """Tries after the first where a connection fails; each pauses twice as long."""

    @property
    def sources(self) -> "list[SourceConfig]":
        """The sources of training; a single one has no name."""
        if isinstance(self.train, str):
            return [SourceConfig.model_construct(name="", shards=self.train, weight=1.0)]
        return self.train

    def problems(self) -> Iterator[tuple[str, str]]:
        """Names tell sources apart, and one source must have a weight."""
        names = [source.name for source in self.sources]
        for number, name in enumerate(names):
            if name in names[:number]:
                yield f"train.{number}.name", f"{name!r} is the name of two sources"
        if isinstance(self.train, list) and not any(source.weight for source in self.train):
            yield "train", "no source has a weight above 0"
