"""The position kinds: what each adds or turns, and angles that no engine can round."""

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.positions import POSITIONS, RotaryPositions, Rotate, SinusoidalPositions, Table
from tests.model.helpers import (
    KINDS,
    difference,
    document,
    logits,
    small_config,
    small_model,
)

CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to(bfloat16)": lambda module: module.to(torch.bfloat16),
    "bfloat16()": lambda module: module.bfloat16(),
    "half()": lambda module: module.half(),
    "deepcopy": lambda module: copy.deepcopy(module).bfloat16(),
    "pickle": lambda module: pickle.loads(pickle.dumps(module)).bfloat16(),
}


def exact_cos(config: ModelConfig) -> Tensor:
    theta = config.rope_base ** (-2.0 * np.arange(config.head_size // 2) / config.head_size)
    return torch.from_numpy(np.cos(np.arange(config.max_positions)[:, None] * theta))


def tables(rotate: Rotate) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines that a rotation carries."""
    assert rotate.rows_T is None
    return rotate.turns_PR2[..., 0], rotate.turns_PR2[..., 1]


class Buffered(nn.Module):
    """The usual way, and the mistake to catch."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.register_buffer("cos", exact_cos(config).float())


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
def test_angles_stay_fp32_when_the_model_is_cast(cast: Callable[[nn.Module], nn.Module]) -> None:
    config = small_config(max_positions=1536, hidden_size=256)
    positions = torch.arange(1536)
    module = cast(RotaryPositions(config))
    assert isinstance(module, RotaryPositions)
    cos, _ = tables(module.rotation(positions))
    assert cos.dtype == torch.float32
    assert difference(cos, exact_cos(config)) < 6e-8
    buffered = cast(Buffered(config))
    assert difference(buffered.get_buffer("cos"), exact_cos(config)) > 1e-4


def test_the_attention_of_a_cast_model_is_given_fp32_angles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    original = Rotate.split

    def spy(self: Rotate, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        result = original(self, qkv)
        seen.append([x.dtype for x in (*result, *tables(self))])
        return result

    monkeypatch.setattr(Rotate, "split", spy)
    logits(small_model(dtype=torch.bfloat16), document(9, 0))
    assert seen == [[torch.bfloat16] * 3 + [torch.float32] * 2] * 2


@pytest.mark.parametrize("kind", ["rope", "sinusoidal"])
def test_tables_are_made_in_fp64_whatever_torchs_defaults(kind: str) -> None:
    """Models are also built under a default type, or on the meta device to be filled later."""
    config = small_config(positions=kind)
    plain = POSITIONS[kind](config)
    torch.set_default_dtype(torch.bfloat16)
    try:
        narrow = POSITIONS[kind](config)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        hollow = POSITIONS[kind](config)
        assert torch.ones(1).is_meta
    for other in (narrow, hollow):
        for name, table in vars(plain).items():
            if isinstance(table, Table):
                assert torch.equal(getattr(other, name).values, table.values)


def test_a_table_follows_its_index_to_another_device_and_back() -> None:
    table = Table(np.arange(6.0).reshape(3, 2))
    assert table[torch.tensor([1], device="meta")].is_meta
    assert table[torch.tensor([1])].tolist() == [[2.0, 3.0]]


@pytest.mark.parametrize("kind", KINDS)
def test_only_learned_positions_are_weights(kind: str) -> None:
    names = [name for name in small_model(positions=kind).state_dict() if "positions" in name]
    assert names == (["encoder.embeddings.positions.embedding.weight"] * (kind == "learned"))


def test_sinusoidal_is_equation_4() -> None:
    config = small_config(positions="sinusoidal")
    size = config.hidden_size
    expected = torch.zeros(config.max_positions, size, dtype=torch.float64)
    for k in range(config.max_positions):
        for t in range(size // 2):
            expected[k, 2 * t] = np.sin(k / 10000 ** (2 * t / size))
            expected[k, 2 * t + 1] = np.cos(k / 10000 ** (2 * t / size))
    module = SinusoidalPositions(config)
    positions = torch.arange(config.max_positions)
    x = torch.ones(config.max_positions, size)
    assert difference(module.embed(0 * x, positions), expected) < 1e-7
    assert difference(module.embed(x, positions), expected + size**0.5) < 1e-6
    interleaved_as_halves = torch.cat([expected[:, ::2], expected[:, 1::2]], dim=1)
    assert difference(interleaved_as_halves, expected) > 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_order_matters_unless_there_are_no_positions(kind: str) -> None:
    model = small_model(positions=kind)
    ids = document(12, 0)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    (straight,), (shuffled,) = logits(model, ids), logits(model, ids[order])
    change = difference(straight[order], shuffled)
    assert change < 1e-10 if kind == "none" else change > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_only_rope_sees_distances_and_nothing_else(kind: str) -> None:
    model, ids = small_model(positions=kind), document(12, 0)
    with torch.no_grad():
        here, there, stretched = (
            model.logits(ids, positions, (12,), torch.arange(12))
            for positions in (torch.arange(12), torch.arange(12) + 40, torch.arange(12) * 3)
        )
    moved, pulled = difference(here, there), difference(here, stretched)
    assert moved < (1e-4 if kind == "rope" else 1e-12) or kind in ("learned", "sinusoidal")
    assert moved > 0.01 or kind in ("rope", "none")
    assert (pulled > 0.01) == (kind != "none")


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_model_stays_near_fp32(kind: str) -> None:
    """In a bf16 model everything is bf16 but the angles; the sinusoids must not widen it."""
    ids = document(40, 0)
    (wide,), (narrow,) = (
        logits(small_model(positions=kind, dtype=dtype), ids)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert narrow.dtype == torch.bfloat16
    assert (wide - narrow).std() < 0.05 * wide.std()


@pytest.mark.parametrize("size", [6, 8])
@pytest.mark.parametrize("pairs", ["interleaved", "halves"])
def test_attention_turns_the_pairs_and_the_part_of_the_config(size: int, pairs: str) -> None:
    """Moving the rows of the projection makes the pairs of one layout those of the other."""
    torch.manual_seed(0)
    config = small_config(rope_size=size, rope_pairs=pairs)
    positions = torch.arange(9) * 5
    x = torch.randn(9, 3, 4, 8)
    rotation = RotaryPositions(config).rotation(positions)
    q, k, v = rotation.split(x.clone())
    place = np.arange(8)
    if pairs == "halves":
        place[:size] = np.arange(size).reshape(2, -1).T.ravel()
    theta = config.rope_base ** (-np.arange(0, size, 2) / size)
    turns = np.exp(1j * positions.numpy()[:, None] * theta)[:, None]
    for turned, still in ((q, x[:, 0]), (k, x[:, 1])):
        assert difference(turned, rotation(still)) < 1e-6
        after, before = (y.double().numpy()[..., place] for y in (turned, still))
        expected = (before[..., :size:2] + 1j * before[..., 1:size:2]) * turns
        assert np.abs(after[..., :size:2] - expected.real).max() < 1e-6
        assert np.abs(after[..., 1:size:2] - expected.imag).max() < 1e-6
        assert np.array_equal(after[..., size:], before[..., size:])
    assert torch.equal(v, x[:, 2])
