"""Initial weights: the paper's distribution, and the same for every arm of a comparison."""

import pytest
import torch

from model.heads import LanguageModel
from model.initialize import initialize
from tests.model.helpers import KINDS, small_config


def initial(kind: str = "rope", seed: int = 5, **changes: int | float) -> dict[str, torch.Tensor]:
    model = LanguageModel(small_config(positions=kind, **changes), vocab_size=500)
    initialize(model, seed)
    return model.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_shared_weights_are_identical_whatever_the_positions(kind: str) -> None:
    rope, other = initial("rope"), initial(kind)
    extra = {"encoder.embeddings.positions.embedding.weight"} if kind == "learned" else set()
    assert other.keys() - rope.keys() == extra
    assert all(torch.equal(other[name], rope[name]) for name in rope)


def test_one_generator_for_all_would_not_do() -> None:
    """What the property guards against: torch's own initial values, one stream for the model."""
    states = []
    for kind in ("rope", "learned"):
        torch.manual_seed(5)
        model = LanguageModel(small_config(positions=kind), vocab_size=500)
        states.append(model.state_dict())
    name = "encoder.layers.0.attention.qkv.weight"
    assert not torch.equal(states[0][name], states[1][name])


def test_seeds_and_names_give_different_values() -> None:
    a, b = initial(seed=5), initial(seed=6)
    matrices = [name for name, value in a.items() if value.ndim == 2]
    assert all(not torch.equal(a[name], b[name]) for name in matrices)
    first, second = (a[f"encoder.layers.{i}.attention.qkv.weight"] for i in (0, 1))
    assert not torch.equal(first, second)
    assert all(torch.equal(a[name], again) for name, again in initial(seed=5).items())


def test_more_layers_keep_the_first_ones() -> None:
    shallow, deep = initial(num_layers=1), initial(num_layers=3)
    assert all(torch.equal(deep[name], value) for name, value in shallow.items())


@pytest.mark.parametrize("std", [0.02, 0.1])
def test_distribution(std: float) -> None:
    for name, value in initial("learned", initializer_range=std).items():
        if value.ndim == 2:
            error = 4 / value.numel() ** 0.5  # in standard deviations
            assert abs(value.mean()) < error * std, name
            assert abs(value.std() / std - 1) < error, name
        elif name.endswith("norm.weight"):
            assert torch.equal(value, torch.ones_like(value))
        else:
            assert name.endswith("bias")
            assert not value.any()
    tails = initial(initializer_range=std)["encoder.embeddings.words.weight"].abs() > 2.1 * std
    assert tails.any()  # a normal distribution, not a truncated one


def test_weights_in_bf16_are_the_fp32_ones_rounded() -> None:
    model = LanguageModel(small_config(), vocab_size=500).bfloat16()
    initialize(model, 5)
    expected = initial()
    assert all(
        torch.equal(value, expected[name].bfloat16()) for name, value in model.state_dict().items()
    )
