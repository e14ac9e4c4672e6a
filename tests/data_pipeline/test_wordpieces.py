"""WoBERT's vocabulary, against Hugging Face's RoFormerTokenizer and jieba's words."""

import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import rjieba

from data_pipeline import wordpieces
from data_pipeline.config import TokenizerConfig
from data_pipeline.corpus import Document
from data_pipeline.index import load_index
from data_pipeline.lanes import Lane
from data_pipeline.masking import mask_tokens
from data_pipeline.seeding import generator
from data_pipeline.shards import write_shards
from data_pipeline.tokenizers import load_tokenizer, train_tokenizer
from data_pipeline.wordpieces import WordPieceTokenizer, cut_words

WORDS = (
    "今天 天气 非常 好 我们 中国 人民 共和国 国务院 法律 规定 条例 北京 大学 清华大学 学生 研究 "
    "生命 起源 的 了 在 是 和 不 也 有 这 那 来到 发展 经济 社会 主义 改革 开放 管理 办法 实施 机关"
    " 公司 银行 合同 当事人 人民法院 判决 执行 宋江 林黛玉 孙悟空 葡萄 蝴蝶 琵琶 玻璃 抖擞 鳏寡"
).split()
OTHERS = (
    "2021年 3.14 1,000 100% １２３ ＡＢＣ hello World2 iPhone12 www.a-b.com GB/T T恤 卡拉OK naïve"
    " Éa か 한국 😀 👨‍👩‍👧 ① ﬁ — … 《》 ， 。 “ ” ! ? 𠀀 [unused1] <S> \u200b \ufffd \ufeff \0 \t "
    "\u3000 \n"
).split(" ")
OTHERS += [" ", "  ", "x" * 120, "啊"]


def make_lines(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [
        "".join(rng.choice(OTHERS if rng.random() < 0.2 else WORDS) for _ in range(8))
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TokenizerConfig:
    """A vocabulary that lacks the rarer words and characters, its special ids far behind."""
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    config = TokenizerConfig(kind="wordpiece", model=str(path), vocab_size=255)
    lines = [line for line in make_lines(300, seed=1) if "鳏" not in line]
    summary = train_tokenizer(config, [Document("d", "\n".join(lines))])
    assert summary.vocab_size == 255
    tokens = path.read_text().splitlines()
    path.write_text("\n".join([tokens[0], *tokens[5:100], *tokens[1:5], *tokens[100:]]) + "\n")
    return config


@pytest.fixture(scope="module")
def wordpiece(config: TokenizerConfig) -> WordPieceTokenizer:
    tokenizer = load_tokenizer(config)
    assert isinstance(tokenizer, WordPieceTokenizer)
    assert tokenizer.specials == (0, 96, 97, 98, 99)
    return tokenizer


def test_ids_are_those_of_hugging_face(
    wordpiece: WordPieceTokenizer, config: TokenizerConfig
) -> None:
    from transformers import RoFormerTokenizer

    tokens = Path(config.model).read_text().splitlines()
    theirs = RoFormerTokenizer(vocab={token: number for number, token in enumerate(tokens)})
    lines = make_lines(10_000, seed=2)
    expected = theirs(lines, add_special_tokens=False)["input_ids"]
    assert [wordpiece.encode(line).tolist() for line in lines] == expected
    whole = "\n".join(lines[:50])
    (expected,) = theirs([whole], add_special_tokens=False)["input_ids"]
    ids = wordpiece.encode(whole)
    assert ids.tolist() == expected
    # All three ways to an id are taken, and [UNK] too.
    kinds = {("##" in tokens[i], len(tokens[i]) > 1) for i in ids.tolist()}
    assert kinds == {(False, False), (False, True), (True, True)}
    assert 0 < wordpiece.count_unknown(ids) == (ids == 96).sum() < 0.1 * len(ids)


def words_of(line: str, wordpiece: WordPieceTokenizer) -> np.ndarray:
    """Return where jieba's words start, word by word."""
    counts = [len(wordpiece.encode(word)) for word in cut_words(line)]
    return np.concatenate([[True] + [False] * (n - 1) for n in counts if n]).astype(bool)


def test_word_starts_are_the_words_of_jieba(wordpiece: WordPieceTokenizer) -> None:
    wrong = total = split = 0
    for line in make_lines(2000, seed=3):
        ids = wordpiece.encode(line)
        if not len(ids):
            continue
        expected = words_of(line, wordpiece)
        unknown = ids == wordpiece.specials.unk
        expected[unknown] = True  # a special id is a word of its own
        expected[1:] |= unknown[:-1]
        wrong += (wordpiece.word_starts(ids) != expected).sum()
        split += (~expected).sum()
        total += len(ids)
    assert split > 0.05 * total
    assert wrong < 0.001 * total
    word = next(w for w in WORDS if len(wordpiece.encode(w)) < len(wordpiece.encode(" ".join(w))))
    assert wordpiece.word_starts(wordpiece.encode(" ".join(word))).all()  # two words, by the space


def test_all_of_a_word_is_masked_and_specials_never(wordpiece: WordPieceTokenizer) -> None:
    cls, sep, mask = wordpiece.specials[2:]
    split = [word for word in WORDS if len(wordpiece.encode(word)) == len(word) == 2]
    split = [word for word in split if not wordpiece.count_unknown(wordpiece.encode(word))]
    line = "，".join(split * 20)
    assert split[0] in rjieba.cut(line, False)
    ids = np.array([cls, *wordpiece.encode(line), sep])
    starts = wordpiece.word_starts(ids)
    word = np.cumsum(starts)
    seen: set[int] = set()
    for number in range(300):
        masked, targets = mask_tokens(
            ids,
            (len(ids),),
            starts,
            generator(number),
            rate=0.3,
            vocab_size=wordpiece.vocab_size,
            specials=wordpiece.specials,
        )
        assert not np.isin(ids[targets], wordpiece.specials).any()
        assert np.isin(word, word[targets]).sum() == len(targets)
        seen.update(masked[targets].tolist())
    assert mask in seen
    assert not seen & {0, 96, cls, sep}
    assert {1, 95, 100, 254} <= seen  # any other id may replace one


def test_shards_and_lanes_use_the_vocabularys_specials(
    wordpiece: WordPieceTokenizer, tmp_path: Path
) -> None:
    documents = [Document(str(n), line) for n, line in enumerate(make_lines(30, seed=4))]
    write_shards(documents, wordpiece, tmp_path / "s", seed=1, min_shards=2, shard_mib=1, workers=2)
    index = load_index(tmp_path / "s")
    assert index.tokenizer_kind == "wordpiece"
    assert index.specials == wordpiece.specials
    row = Lane(index, seed=1, lane=0, lanes=2).next_row(200)
    assert row.ids[0] == 97
    assert (row.ids == 97).sum() - (row.ids == 98).sum() in (0, 1)


def test_decoding_keeps_the_letters(wordpiece: WordPieceTokenizer) -> None:
    text = "今天天气非常好，我们来到北京大学"
    assert wordpiece.decode(wordpiece.encode(text)) == text
    assert wordpiece.decode(np.array([97, *wordpiece.encode("Hello hello"), 98])) == "hello hello"
    assert pickle.loads(pickle.dumps(wordpiece)).sha256 == wordpiece.sha256


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"[PAD]\n[UNK]\n[CLS]\n", r"does not have \[SEP\] \[MASK\]"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\na\n", "has 'a' of line 6 in another line"),
        (b"[PAD]\n\xff\n", "is not UTF-8 at byte 6"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n", "has vocab_size 6, and the config says"),
    ],
)
def test_other_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    config = TokenizerConfig(kind="wordpiece", model=str(path), vocab_size=99)
    with pytest.raises(ValueError, match=rf"vocab\.txt {message}") as caught:
        load_tokenizer(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("vocab_size", "message"), [(20, "has no room .* at least"), (5000, "is more than .* at most")]
)
def test_what_cannot_be_trained_is_one_line(vocab_size: int, message: str, tmp_path: Path) -> None:
    model = tmp_path / "new" / "vocab.txt"
    config = TokenizerConfig(kind="wordpiece", model=str(model), vocab_size=vocab_size)
    with pytest.raises(ValueError, match=rf"tokenizer\.vocab_size={vocab_size} {message}"):
        train_tokenizer(config, [Document("d", "\n".join(make_lines(50, seed=5)))])
    assert not model.parent.exists()


def test_missing_packages_are_named(
    config: TokenizerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wordpieces, "IS_INSTALLED", False)
    with pytest.raises(ValueError, match=r"^tokenizer\.kind=wordpiece needs rjieba .*chinese"):
        load_tokenizer(config)
