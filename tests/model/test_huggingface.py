"""The same weights give the same logits as in Hugging Face's models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, RoFormerConfig, RoFormerForMaskedLM

from model import positions as positions_module
from model.encoder import Embeddings
from model.heads import LanguageModel
from model.huggingface import ANGLES, from_huggingface, to_huggingface
from model.kernels.rotary import rotate_qk
from model.positions import Rotate
from tests.model.helpers import (
    VOCAB,
    difference,
    document,
    scatter_weights,
    small_config,
    small_model,
)

THEIRS: dict[str, tuple[type, type]] = {
    "rope": (RoFormerConfig, RoFormerForMaskedLM),
    "learned": (BertConfig, BertForMaskedLM),
}
SIZES: dict[str, Any] = {"num_layers": 3, "hidden_size": 48, "num_heads": 4, "type_vocab_size": 3}
BOTH = pytest.mark.parametrize("kind", THEIRS)


def their_model(kind: str, **changes: Any) -> nn.Module:
    config_type, model_type = THEIRS[kind]
    config = small_config(positions=kind, **SIZES)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "type_vocab_size": config.type_vocab_size,
        "layer_norm_eps": config.layer_norm_eps,
        "attn_implementation": "eager",
    }
    model = model_type(config_type(**{**sizes, **changes})).eval()
    scatter_weights(model)
    return model


def our_model(kind: str, theirs: nn.Module) -> LanguageModel:
    config = small_config(positions=kind, **SIZES)
    model = LanguageModel(config, vocab_size=VOCAB)
    model.load_state_dict(from_huggingface(theirs.state_dict(), config))
    return model.eval()


def largest_difference(ours: LanguageModel, theirs: nn.Module) -> float:
    """Compare the logits of two texts of 64 tokens with token types, one a row for them."""
    ids = document(128, 0)
    types = torch.randint(3, (128,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(
            input_ids=ids.view(2, 64),
            token_type_ids=types.view(2, 64),
            attention_mask=torch.ones(2, 64, dtype=torch.long),
        ).logits
        out = ours.logits(ids, torch.arange(64).repeat(2), (64, 64), torch.arange(128), types)
    assert expected.std() > 0.5
    return difference(out, expected.flatten(0, 1))


@BOTH
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_logits_equal(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    theirs = their_model(kind)
    largest = largest_difference(our_model(kind, theirs).to(dtype), theirs.to(dtype))
    assert largest < tolerance


@BOTH
def test_export_loads_into_their_model(kind: str) -> None:
    ours, theirs = small_model(positions=kind, dtype=torch.float32, **SIZES), their_model(kind)
    assert largest_difference(ours, theirs) > 0.1
    theirs.load_state_dict(to_huggingface(ours.state_dict(), ours.config), strict=True)
    assert largest_difference(ours, theirs) < 1e-5


def test_export_carries_another_base_of_the_angles() -> None:
    theirs = their_model("rope")
    ours = small_model(dtype=torch.float32, rope_base=500.0, **SIZES)
    theirs.load_state_dict(to_huggingface(ours.state_dict(), ours.config))
    assert largest_difference(ours, theirs) < 1e-5
    usual = small_model(dtype=torch.float32, **SIZES)
    assert largest_difference(usual, theirs) > 0.01


@BOTH
def test_there_and_back_is_exact(kind: str) -> None:
    theirs, config = their_model(kind).state_dict(), small_config(positions=kind, **SIZES)
    back = to_huggingface(from_huggingface(theirs, config), config)
    assert back.keys() == theirs.keys()
    for name, value in theirs.items():
        assert difference(back[name], value) == (
            0 if name != ANGLES else pytest.approx(0, abs=1e-7)
        )


def test_the_exported_angles_are_sine_then_cosine() -> None:
    ours = small_model(**SIZES, dtype=torch.float32)
    table = to_huggingface(ours.state_dict(), ours.config)[ANGLES]
    sine, cosine = table.chunk(2, dim=-1)
    assert table.shape == (64, 12)
    assert torch.equal(sine[0], torch.zeros(6))
    assert torch.equal(cosine[0], torch.ones(6))
    assert sine[1, 0].item() == pytest.approx(0.8414709848)
    assert sine[1, 1].item() == pytest.approx(0.2137807, abs=1e-6)  # sin(10000 ** (-2 / 12))


def wrong_pairs(qkv: Tensor, *where: Tensor, halves: bool) -> tuple[Tensor, Tensor, Tensor]:
    return rotate_qk(qkv, *where, halves=not halves)


def turned_values(self: Rotate, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.unbind(1)
    return self(q), self(k), self(v)


def without_norm(self: Embeddings, ids: Tensor, positions: Tensor, types: Tensor) -> Tensor:
    return self.positions.embed(self.words(ids) + self.token_types(types), positions)


def reset_types(self: Embeddings, ids: Tensor, positions: Tensor, types: Tensor) -> Tensor:
    return self.norm(self.positions.embed(self.words(ids) + self.token_types(types * 0), positions))


def tanh_gelu(x: Tensor) -> Tensor:
    return torch.ops.aten.gelu(x, approximate="tanh")


MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "halves": (positions_module, "rotate_qk", wrong_pairs),
    "no rotation": (positions_module.RotaryPositions, "rotation", lambda self, positions: None),
    "turned values": (Rotate, "split", turned_values),
    "no embedding LayerNorm": (Embeddings, "forward", without_norm),
    "no token types": (Embeddings, "forward", reset_types),
    "tanh GELU": (F, "gelu", tanh_gelu),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_the_comparison_sees_mistakes(
    mistake: tuple[Any, str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = their_model("rope")
    ours = our_model("rope", theirs)
    monkeypatch.setattr(*mistake)
    assert largest_difference(ours, theirs) > 1e-4


def test_swapped_projections_are_seen() -> None:
    theirs = their_model("rope")
    ours = our_model("rope", theirs)
    ours.load_state_dict(
        {
            name: value.roll(len(value) // 3, 0) if "qkv" in name else value
            for name, value in ours.state_dict().items()
        }
    )
    assert largest_difference(ours, theirs) > 0.1


@BOTH
def test_tied_copies_and_other_heads_may_be_absent_or_present(kind: str) -> None:
    theirs, config = their_model(kind).state_dict(), small_config(positions=kind, **SIZES)
    expected = from_huggingface(theirs, config)
    for name in ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias", ANGLES):
        theirs.pop(name, None)
    if kind == "learned":
        theirs |= {
            "bert.embeddings.position_ids": torch.arange(64),
            "bert.pooler.dense.weight": torch.ones(48, 48),
            "cls.seq_relationship.bias": torch.ones(2),
        }
    result = from_huggingface(theirs, config)
    assert all(torch.equal(result[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w.pop("roformer.encoder.layer.1.attention.self.key.bias"),
            r"layer.1.*key.bias: ",
        ),
        (lambda w: w.pop("cls.predictions.bias"), r"^cls.predictions.bias: missing"),
        (
            lambda w: w.update({"roformer.embeddings_project.weight": torch.ones(2)}),
            r"project.* no ",
        ),
        (
            lambda w: w.update({"cls.predictions.transform.dense.weight": torch.ones(48, 2)}),
            r"transform.dense.weight: shape \[48, 2\].*\[48, 48\]",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(
    change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    weights = dict(their_model("rope").state_dict())
    change(weights)
    with pytest.raises(ValueError, match=message) as error:
        from_huggingface(weights, small_config(**SIZES))
    assert "\n" not in str(error.value)


def test_more_layers_than_configured_are_refused() -> None:
    weights = their_model("rope").state_dict()
    with pytest.raises(ValueError, match=r"layer\.2\."):
        from_huggingface(weights, small_config(**{**SIZES, "num_layers": 2}))


@pytest.mark.parametrize("kind", ["sinusoidal", "none"])
def test_kinds_they_do_not_have_are_refused(kind: str) -> None:
    model = small_model(positions=kind)
    with pytest.raises(ValueError, match=f"positions={kind} .* rope and learned"):
        to_huggingface(model.state_dict(), model.config)


def test_linear_attention_is_refused() -> None:
    model = small_model(attention="linear")
    with pytest.raises(ValueError, match="attention=linear has no Hugging Face form"):
        to_huggingface(model.state_dict(), model.config)


@pytest.mark.parametrize("changes", [{"rope_pairs": "halves"}, {"rope_size": 4}])
def test_rotations_that_roformer_has_not_are_refused(changes: dict[str, Any]) -> None:
    model = small_model(**changes)
    with pytest.raises(ValueError, match="no Hugging Face form"):
        to_huggingface(model.state_dict(), model.config)
    assert to_huggingface(small_model().state_dict(), small_config())
