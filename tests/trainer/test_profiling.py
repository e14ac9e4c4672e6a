"""The profiler's parts, on a real training step: every product is found where it belongs."""

from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from model.config import ModelConfig
from model.flops import training_flops
from model.heads import LanguageModel
from trainer.profiling import OTHER, PARTS, Breakdown, break_down, named_parts

VOCABULARY, TARGETS = 211, 30
LENGTHS = (70, 70, 90)
SIZES = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96}


def profiled(config: ModelConfig, *, checkpoint_layers: bool = False) -> Breakdown:
    torch.manual_seed(0)
    model = LanguageModel(config, vocab_size=VOCABULARY, checkpoint_layers=checkpoint_layers)
    adamw = torch.optim.AdamW(model.parameters(), fused=True)
    engine = SimpleNamespace(step=adamw.step)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    index = torch.arange(TARGETS)
    with (
        named_parts(model, engine),
        profile(activities=[ProfilerActivity.CPU], with_flops=True, record_shapes=True) as profiler,
    ):
        model(positions % VOCABULARY, positions, LENGTHS, index, index).total.backward()
        engine.step()
    assert engine.step == adamw.step  # nothing stays wrapped
    assert not any("forward" in vars(module) for module in model.modules())
    return break_down(profiler.events(), on_device=False)


def linear_flops(config: ModelConfig) -> int:
    """Count the products outside of attention and head."""
    model = config.model_copy(update={"num_heads": 1})
    whole = training_flops(model, 0, LENGTHS, TARGETS)
    attention = 6 * config.num_layers * sum(2 * n * n * config.hidden_size for n in LENGTHS)
    return whole - attention - 6 * TARGETS * config.hidden_size**2


def test_products_outside_attention_and_head_are_the_counted_ones() -> None:
    config = ModelConfig(**SIZES, dropout=0.1)
    breakdown = profiled(config)
    assert breakdown.matmul_flops == linear_flops(config)
    expected = {"matmul", "attention", "rotary", "head", "norm", "optimizer", "activation"}
    assert expected | {"embeddings", OTHER} == breakdown.seconds.keys()
    assert all(seconds > 0 for seconds in breakdown.seconds.values())
    assert breakdown.seconds.keys() - {OTHER} <= set(PARTS)


def test_recomputed_products_are_seen_as_well() -> None:
    config = ModelConfig(**SIZES, dropout=0.0)
    again = profiled(config, checkpoint_layers=True).matmul_flops - linear_flops(config)
    width, inner, tokens = config.hidden_size, config.intermediate_size, sum(LENGTHS)
    after = width * width + 2 * width * inner
    assert again == 2 * (2 * tokens * 3 * width * width + (tokens + TARGETS) * after)


@pytest.mark.parametrize("positions", ["learned", "none"])
def test_without_rope_nothing_is_rotary(positions: str) -> None:
    assert "rotary" not in profiled(ModelConfig(**SIZES, positions=positions)).seconds


def test_linear_attention_is_attention() -> None:
    breakdown = profiled(ModelConfig(**SIZES, attention="linear"))
    assert breakdown.seconds["attention"] > 0
    assert breakdown.matmul_flops == linear_flops(ModelConfig(**SIZES))
