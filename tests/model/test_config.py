"""The model's configuration: text becomes numbers, and what does not fit is named."""

import subprocess
import sys
from typing import get_args, get_type_hints

import pytest
from pydantic import ValidationError

from model.attention import CORES
from model.config import ModelConfig
from model.positions import POSITIONS
from tests.model.helpers import KINDS


def test_defaults_are_the_papers_base_model() -> None:
    config = ModelConfig()
    assert (config.num_layers, config.hidden_size, config.num_heads) == (12, 768, 12)
    assert (config.intermediate_size, config.head_size, config.positions) == (3072, 64, "rope")
    assert list(config.problems()) == []


def test_scalars_may_be_text() -> None:
    config = ModelConfig.model_validate({"layer_norm_eps": "1e-5", "hidden_size": "96"})
    assert (config.layer_norm_eps, config.head_size) == (1e-5, 8)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("num_layers", -1),
        ("num_layers", None),
        ("num_layers", "2.5"),
        ("hidden_size", "wide"),
        ("dropout", 1.0),
        ("dropout", -0.1),
        ("dropout", "nan"),
        ("layer_norm_eps", 0),
        ("rope_base", "inf"),
        ("positions", "rotary"),
        ("attention", "quadratic"),
        ("features", "relu"),
        ("num_features", 0),
        ("redraw_steps", -1),
        ("num_layer", 2),
    ],
)
def test_wrong_values_and_unknown_keys_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as error:
        ModelConfig.model_validate({field: value})
    assert [problem["loc"] for problem in error.value.errors()] == [(field,)]


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"hidden_size": 100, "num_heads": 12}, ("100", "12")),
        ({"hidden_size": 36, "num_heads": 12}, ("36", "12", "3")),
        ({"hidden_size": 33, "num_heads": 3, "positions": "sinusoidal"}, ("33",)),
    ],
)
def test_sizes_that_do_not_fit_are_named(
    changes: dict[str, object], numbers: tuple[str, ...]
) -> None:
    ((field, message),) = ModelConfig.model_validate(changes).problems()
    assert field == "hidden_size"
    assert all(number in message for number in numbers)


@pytest.mark.parametrize(
    ("changes", "field", "told"),
    [
        ({"attention": "linear", "attention_dropout": 0.1}, "attention_dropout", "0.1"),
        ({"features": "favor"}, "features", "softmax"),
        ({"attention": "linear", "features": "favor", "num_features": 7}, "num_features", "take 8"),
        ({"attention": "linear", "hidden_size": 36}, "hidden_size", "an odd size"),
    ],
)
def test_kinds_that_do_not_fit_are_named(changes: dict[str, object], field: str, told: str) -> None:
    ((found, message),) = ModelConfig.model_validate(changes).problems()
    assert found == field
    assert told in message


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": "learned", "features": "favor", "num_features": 7},
        {"features": "favor", "hidden_size": 36},  # rope turns features, of which there are 256
        {"features": "elu", "num_features": 7},
    ],
)
def test_kinds_that_fit_are_accepted(changes: dict[str, object]) -> None:
    config = ModelConfig.model_validate({"attention": "linear", **changes})
    assert list(config.problems()) == []


@pytest.mark.parametrize("size", [7, 10])
def test_a_rotated_part_that_is_odd_or_too_large_is_named(size: int) -> None:
    changes: dict[str, object] = {"hidden_size": 32, "num_heads": 4, "rope_size": size}
    ((field, message),) = ModelConfig.model_validate(changes).problems()
    assert (field, message) == ("rope_size", f"{size} is odd or over the 8 features of a head")
    for fitting in ({"rope_size": 6}, {"rope_size": 8}, {"positions": "none"}):
        assert not list(ModelConfig.model_validate(changes | fitting).problems())


def test_an_odd_head_size_suits_the_absolute_kinds() -> None:
    for kind in ("learned", "none"):
        config = ModelConfig.model_validate({"hidden_size": 36, "num_heads": 12, "positions": kind})
        assert list(config.problems()) == []


def test_is_frozen() -> None:
    with pytest.raises(ValidationError):
        ModelConfig().num_layers = 3  # type: ignore[misc]


def test_every_kind_of_the_config_has_its_class() -> None:
    fields = get_type_hints(ModelConfig)
    assert set(POSITIONS) == set(get_args(fields["positions"])) == set(KINDS)
    assert set(CORES) == set(get_args(fields["attention"]))


def test_the_config_is_read_without_torch() -> None:
    code = "import sys, model.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
