import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from configs.loader import load
from launch.plan import activation_bytes, make_plan, print_plan, state_bytes
from model.config import ModelConfig
from model.heads import LanguageModel
from model.linear_attention import LinearCore
from model.pack import Pack
from model.positions import RotaryPositions
from trainer.config import EngineConfig

CONFIGS = Path(__file__).parents[2] / "configs"


def test_paper_plan_has_the_papers_numbers():
    plan = make_plan(load(CONFIGS / "paper/chinese.yaml"), world=8, vocab_size=50_000)
    tokens = [row.stage.num_steps * row.stage.step_tokens for row in plan.stages]
    assert [round(count / 1e9, 1) for count in tokens] == [26.2, 4.9, 7.9, 5.2, 3.9, 7.9]
    assert sum(tokens) == pytest.approx(56.0e9, rel=2e-3)
    for row in plan.stages:
        factors = row.factors
        assert factors.micro_batch * factors.accumulation * 8 == row.stage.global_batch
        assert factors.micro_batch * row.stage.seq_len <= 16384


def test_parameters_are_those_of_the_model():
    config = load(CONFIGS / "demo.yaml")
    plan = make_plan(config, world=2, vocab_size=8000)
    model = LanguageModel(config.model, vocab_size=8000)
    assert plan.num_parameters == sum(p.numel() for p in model.parameters())
    assert plan.checkpoint_bytes == 3 * sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.parametrize(
    ("stage", "precision", "bytes_a_parameter"),
    [
        (0, "fp32", 16),
        (1, "fp32", 4 + 4 + 12 / 4),
        (2, "fp32", 4 + 4 / 4 + 12 / 4),
        (3, "fp32", (4 + 4 + 12) / 4),
        (0, "bf16", 16),
        (1, "bf16", 2 + 2 + 12 / 4),
        (3, "bf16", 16 / 4),
    ],
)
def test_zero_parts_the_state_over_ranks(stage, precision, bytes_a_parameter):
    engine = EngineConfig(zero_stage=stage, precision=precision)
    assert state_bytes(1000, engine, world=4) == round(1000 * bytes_a_parameter)


def test_printed_plan_says_what_is_not_ready(tmp_path):
    console = Console(record=True, width=100, file=io.StringIO())
    print_plan(load(CONFIGS / "paper/chinese.yaml", [f"run.dir={tmp_path}"]), console)
    text = console.export_text()
    assert "452,500" not in text
    for expected in ("200,000", "1,536", "26.2 B", "ZeRO-1", "not ready: data/chinese"):
        assert expected in text
    assert not list(tmp_path.iterdir())  # a plan writes nothing


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("features", ["elu", "favor"])
def test_linear_attention_keeps_about_what_the_plan_says(features, causal):
    softmax = ModelConfig()
    linear = ModelConfig(attention="linear", features=features)
    with_it, without = (
        activation_bytes(model, EngineConfig(), 100, 512, 0.1, causal=causal)
        for model in (linear, softmax)
    )
    core = LinearCore(linear, causal=causal)
    rotate = RotaryPositions(linear).rotation(torch.arange(512))
    qkv = torch.randn(512, 3, 12, 64, requires_grad=True)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        core(*qkv.unbind(1), rotate=rotate, pack=Pack((512,)))
    kept.pop(qkv.untyped_storage().data_ptr(), None)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert (with_it - without) / softmax.num_layers == pytest.approx(measured, rel=0.25)
