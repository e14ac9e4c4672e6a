import pytest
from pydantic import ValidationError

from data_pipeline.config import CorpusConfig, DataConfig, TokenizerConfig


def test_scalars_arrive_as_text() -> None:
    assert CorpusConfig(shard_mib="1e-1", workers="2").shard_mib == 0.1
    assert DataConfig(lanes="16", eval=None).lanes == 16
    assert CorpusConfig(train="one.txt").train == ["one.txt"]


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        (DataConfig, {"lanes": "0"}),
        (DataConfig, {"workers": "-1"}),
        (DataConfig, {"lane": "3"}),
        (CorpusConfig, {"shard_mib": "inf"}),
        (TokenizerConfig, {"kind": "word"}),
        (TokenizerConfig, {"normalizer": None}),
    ],
)
def test_wrong_values_are_refused(section: type, fields: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        section(**fields)


def test_a_trained_tokenizer_needs_a_file() -> None:
    assert [field for field, _ in TokenizerConfig(model="").problems()] == ["model"]
    assert not list(TokenizerConfig(model="", kind="bytes").problems())
