import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.config import TokenizerConfig
from data_pipeline.corpus import Document
from data_pipeline.sampling import MAX_LINE_CHARS, TRAINING_LINE, LineSample, split_lines
from data_pipeline.sentencepieces import SentencePieceTokenizer
from data_pipeline.specials import NUM_SPECIALS, STANDARD
from data_pipeline.tokenizers import (
    BytesTokenizer,
    Tokenizer,
    load_tokenizer,
    train_tokenizer,
)

TYPED = [
    "[MASK]",
    "a [PAD] [UNK] [CLS] [SEP] [MASK] b",
    "<pad> <unk> <s> </s> <mask> <0x41>",
    "x[MASK][MASK]y",
    "▁[MASK]▁",
    "\x00 😀 漢字 [CLS",
]


@pytest.mark.parametrize("text", TYPED)
def test_typed_specials_are_text(any_tokenizer: Tokenizer, text: str) -> None:
    ids = any_tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.min() >= NUM_SPECIALS
    assert ids.max() < any_tokenizer.vocab_size
    plain = " ".join(text.replace("▁", " ").split())
    assert " ".join(any_tokenizer.decode(ids).replace("▁", " ").split()) == plain


def test_a_user_defined_mask_would_not_be_text(documents: list[Document], tmp_path: Path) -> None:
    """The negative control: the check above sees the fault that it is there for."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([document.text for document in documents]),
        model_prefix=str(tmp_path / "m"),
        vocab_size=480,
        byte_fallback=True,
        user_defined_symbols=["[MASK]"],
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    assert processor.piece_to_id("[MASK]") in processor.encode("a [MASK] b")
    config = TokenizerConfig(model=str(tmp_path / "m.model"))
    with pytest.raises(ValueError, match=r"does not have .* as ids 0 to 4"):
        load_tokenizer(config)


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = BytesTokenizer()
    ids = tokenizer.encode(text)
    wrapped = np.array([STANDARD.cls, *ids, STANDARD.sep])
    assert tokenizer.decode(wrapped) == text
    assert len(ids) == 0 or ids.min() >= NUM_SPECIALS


def test_no_text_is_no_ids(any_tokenizer: Tokenizer) -> None:
    ids = any_tokenizer.encode("")
    assert len(ids) == 0
    assert any_tokenizer.decode(ids) == ""
    assert len(any_tokenizer.word_starts(ids)) == 0


def test_word_starts_are_the_words_of_the_text(
    any_tokenizer: Tokenizer, documents: list[Document]
) -> None:
    for document in documents[:20]:
        ids = any_tokenizer.encode(document.text)
        starts = any_tokenizer.word_starts(ids)
        words = [
            any_tokenizer.decode(word).strip() for word in np.split(ids, np.flatnonzero(starts)[1:])
        ]
        assert words == document.text.split()


def test_special_ids_are_words_of_their_own(any_tokenizer: Tokenizer) -> None:
    inner = any_tokenizer.encode("abc")[-1]  # continues a word
    ids = np.array([STANDARD.cls, inner, STANDARD.mask, inner, inner, STANDARD.sep])
    assert any_tokenizer.word_starts(ids).tolist() == [True, True, True, True, False, True]


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_the_same_corpus_gives_the_same_file(
    kind: str, configs: dict[str, TokenizerConfig], documents: list[Document], tmp_path: Path
) -> None:
    model = tmp_path / "new" / "again.model"
    config = configs[kind].model_copy(update={"model": str(model)})
    summary = train_tokenizer(config, documents)
    assert model.read_bytes() == Path(configs[kind].model).read_bytes()
    assert summary.sha256 == load_tokenizer(configs[kind]).sha256
    assert (summary.model, summary.documents) == (model, len(documents))
    assert [path.name for path in model.parent.iterdir()] == ["again.model"]
    train_tokenizer(config, documents[:-5])
    assert model.read_bytes() != Path(configs[kind].model).read_bytes()


def test_bytes_need_no_training(configs: dict[str, TokenizerConfig]) -> None:
    summary = train_tokenizer(configs["bytes"], [])
    assert (summary.model, summary.vocab_size) == (None, 261)
    assert not Path(configs["bytes"].model).exists()


@given(st.text(st.sampled_from("ab\n é"), max_size=4000), st.integers(1, 5))
def test_training_lines_keep_all_text(text: str, times: int) -> None:
    text *= times
    lines = TRAINING_LINE.findall(text)
    assert "".join(lines) == text.replace("\n", "")
    assert all(1 <= len(line) <= MAX_LINE_CHARS for line in lines)


def test_long_lines_are_split_at_spaces(tmp_path: Path, documents: list[Document]) -> None:
    text = " ".join(document.text for document in documents)
    lines = TRAINING_LINE.findall(text)
    assert len(lines) > 20
    assert [word for line in lines for word in line.split()] == text.split()
    # All of it on one line, reserved characters between: nothing is left out.
    config = TokenizerConfig(model=str(tmp_path / "m.model"), vocab_size=480)
    train_tokenizer(config, [Document("long", text.replace(". ", "▅"))])
    tokenizer = load_tokenizer(config)
    frequent = documents[0].text.split()[0]
    assert len(tokenizer.encode(frequent)) <= len(frequent)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize(
    ("text", "vocab_size", "message"),
    [
        ("to be or not to be", 8000, "vocab_size=8000 is more than this corpus .* at most 2"),
        ("to be or not to be", 20, "vocab_size=20 has no room for .* at least 2"),
        ("\u200b \n", 300, "cannot train on this corpus of 2 characters"),
        (None, 300, "corpus.train holds no document"),
    ],
)
def test_what_cannot_be_trained_is_one_line(
    kind: str, text: str | None, vocab_size: int, message: str, tmp_path: Path
) -> None:
    model = tmp_path / "new" / "m.model"
    config = TokenizerConfig(kind=kind, model=str(model), vocab_size=vocab_size)
    documents = [] if text is None else [Document("d", text)]
    with pytest.raises(ValueError, match=message) as caught:
        train_tokenizer(config, documents)
    assert "\n" not in str(caught.value)
    assert not model.parent.exists()


def test_the_largest_vocabulary_it_names_can_be_trained(tmp_path: Path) -> None:
    config = TokenizerConfig(model=str(tmp_path / "m.model"), vocab_size=8000)
    documents = [Document("d", "the quick brown fox jumps over the lazy dog " * 9)]
    with pytest.raises(ValueError, match="at most") as caught:
        train_tokenizer(config, documents)
    most = int(re.findall(r"\d+", str(caught.value))[-1])
    largest = config.model_copy(update={"vocab_size": most})
    train_tokenizer(largest, documents)
    assert load_tokenizer(largest).vocab_size == most


def test_an_error_of_the_corpus_stays_its_own(tmp_path: Path) -> None:
    def broken() -> Iterator[Document]:
        yield Document("a", "to be or not")
        raise ValueError("x.jsonl:2: not JSON")

    with pytest.raises(ValueError, match=r"^x\.jsonl:2: not JSON$"):
        train_tokenizer(TokenizerConfig(model=str(tmp_path / "m.model")), broken())


def field_ends(model: bytes) -> list[int]:
    """Return where each top-level field of a protobuf message ends."""
    ends, offset = [], 0
    while offset < len(model):
        size, shift = 0, 0
        offset += 1  # the tag
        while True:
            byte = model[offset]
            offset += 1
            size |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        offset += size
        ends.append(offset)
    return ends


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_cut_model_is_refused(
    kind: str, configs: dict[str, TokenizerConfig], tmp_path: Path
) -> None:
    model = Path(configs[kind].model).read_bytes()
    ends = field_ends(model)
    assert ends[-1] == len(model)
    path = tmp_path / "cut.model"
    config = TokenizerConfig(kind=kind, model=str(path), vocab_size=480)
    for cut in [0, 1, 100, ends[0], ends[3], ends[300], *ends[-4:-1], len(model) - 1]:
        path.write_bytes(model[:cut])
        with pytest.raises(ValueError, match=r"cut\.model .*; train it with") as caught:
            load_tokenizer(config)
        assert "\n" not in str(caught.value)
    path.write_bytes(model)
    assert load_tokenizer(config).vocab_size == 480


@pytest.mark.parametrize("content", [None, b"hello, world", b"\x00" * 999, b"\x1f\x8b" * 99])
def test_other_files_are_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "other.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"other\.model .*; train it with"):
        load_tokenizer(TokenizerConfig(model=str(path)))


def model_of(folder: Path, documents: list[Document], **fields: Any) -> Tokenizer:
    config = TokenizerConfig(model=str(folder / "m.model"), **{"vocab_size": 480, **fields})
    train_tokenizer(config, documents)
    return load_tokenizer(config)


@pytest.fixture(scope="module")
def exact(
    tmp_path_factory: pytest.TempPathFactory, documents: list[Document]
) -> SentencePieceTokenizer:
    folder = tmp_path_factory.mktemp("exact")
    tokenizer = model_of(folder, documents, normalizer="identity", kind="bpe")
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer


@given(st.text() | st.text(st.sampled_from("ab ▁▅\0\r\n\t\u3000ﬁ①😀é漢\ufeff")))
def test_identity_gives_any_text_back(exact: SentencePieceTokenizer, text: str) -> None:
    ids = exact.encode(text)
    assert exact.decode(ids) == text
    assert not (ids < NUM_SPECIALS).any()


def test_words_under_identity_end_at_any_white_space(exact: SentencePieceTokenizer) -> None:
    text = "one  two\nthree\t\tfour\r\nfive▁six"
    ids = exact.encode(text)
    parts = np.split(ids, np.flatnonzero(exact.word_starts(ids))[1:])
    words = [exact.decode(part).strip() for part in parts]
    assert [word for word in words if word] == ["one", "two", "three", "four", "five▁six"]


def test_normalizers_are_what_they_say(documents: list[Document], tmp_path: Path) -> None:
    text = "ﬁ ①  x\tDer"
    for normalizer, expected in (("nmt_nfkc", "fi 1 x Der"), ("nfkc", "fi 1 x\tDer")):
        tokenizer = model_of(tmp_path, documents, normalizer=normalizer, kind="bpe")
        assert tokenizer.decode(tokenizer.encode(text)) == expected
    with pytest.raises(ValueError, match=r"has normalizer nfkc, and the config says .*=identity"):
        load_tokenizer(
            TokenizerConfig(
                kind="bpe", model=f"{tmp_path}/m.model", vocab_size=480, normalizer="identity"
            )
        )


def test_a_model_of_another_kind_or_size_is_refused(configs: dict[str, TokenizerConfig]) -> None:
    model = configs["bpe"].model
    for wrong, message in [
        ({"kind": "unigram"}, "has kind bpe, and the config says tokenizer.kind=unigram"),
        ({"vocab_size": 479}, "has vocab_size 480, and the config says tokenizer.vocab_size=479"),
    ]:
        fields = {"kind": "bpe", "model": model, "vocab_size": 480, **wrong}
        with pytest.raises(ValueError, match=message):
            load_tokenizer(TokenizerConfig(**fields))
    takes_any = TokenizerConfig(kind="bpe", model=model, vocab_size=None)
    assert load_tokenizer(takes_any).vocab_size == 480
    with pytest.raises(ValueError, match=r"tokenizer\.vocab_size is null"):
        train_tokenizer(takes_any, [])


def test_a_lone_surrogate_is_a_valueerror(any_tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="surrogates not allowed"):
        any_tokenizer.encode("a\ud800")


def test_unknown_is_what_has_no_piece(any_tokenizer: Tokenizer) -> None:
    known, unknown = (any_tokenizer.encode(text) for text in ("abc", "abc漢"))
    assert any_tokenizer.count_unknown(known) == 0
    expected = 0 if any_tokenizer.kind == "bytes" else 3
    assert any_tokenizer.count_unknown(unknown) == expected


def test_a_sample_is_bounded_fair_and_always_the_same() -> None:
    documents = [
        Document(str(n), "\n".join(f"{n} {line} " + "x" * (line % 50) for line in range(100)))
        for n in range(200)
    ]
    whole = [line for document in documents for line in split_lines(document.text)]
    everything = LineSample(documents, None)
    assert list(everything.lines()) == whole
    assert list(LineSample(documents, everything.sampled / 1e6).lines()) == whole
    sample = LineSample(documents, 0.1)
    assert (sample.documents, sample.characters) == (200, everything.characters)
    assert 50_000 < sample.sampled <= 100_000
    lines = list(sample.lines())
    assert sum(map(len, lines)) == sample.sampled
    assert list(sample.lines()) == []  # each is let go when it was used
    assert lines == list(LineSample(documents, 0.1).lines())
    of_whole = iter(whole)
    assert all(line in of_whole for line in lines)  # in their order
    share = len(lines) / len(whole)
    halves = sum(int(line.split()[0]) < 100 for line in lines) / len(lines)
    assert 0.4 < halves < 0.6
    assert 0.1 < share < 0.3


def test_strange_text_trains(tmp_path: Path) -> None:
    """NUL, a line of a megabyte, nothing but long lines: all of it is used."""
    word = "abcdefghij"
    text = f"{word} " * 10_000 + "\n" + "z" * 10**6 + "\n\0" + "q\0" * 3000
    tokenizer = model_of(tmp_path, [Document("d", text)], vocab_size=275)
    for part in (word, "z", "q"):
        assert tokenizer.count_unknown(tokenizer.encode(part)) == 0
