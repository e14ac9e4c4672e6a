import pytest
import torch

from configs.loader import ConfigError, load
from launch.preflight import prepare
from launch.resume import load_weights, order_of
from model.config import ModelConfig
from model.heads import LanguageModel
from trainer.checkpoint import Checkpoint
from trainer.state import TrainState

MODEL = ModelConfig(num_layers=1, hidden_size=16, num_heads=2, intermediate_size=32)


def checkpoint_of(model, tmp_path) -> Checkpoint:
    tensors = {name: {"value": value.detach() + 1} for name, value in model.named_parameters()}
    return Checkpoint(tmp_path / "step-00000003", TrainState(), 3, {}, "", tensors)


def test_weights_of_another_model_are_refused_by_name(tmp_path):
    saved = checkpoint_of(LanguageModel(MODEL, vocab_size=31), tmp_path)
    own = LanguageModel(MODEL, vocab_size=31)
    load_weights(own, saved)
    for name, value in own.named_parameters():
        assert torch.equal(value.detach(), saved.tensors[name]["value"])
    with pytest.raises(ConfigError) as refused:
        load_weights(LanguageModel(MODEL, vocab_size=32), saved)
    (problem,) = refused.value.problems
    assert "step-00000003" in problem
    assert "(31, 16) there, and (32, 16) here" in problem


def test_cursors_belong_to_data_lanes_and_seed_alone(tiny_config):
    def order(*overrides: str) -> str:
        return order_of(prepare(load(tiny_config, list(overrides)), 1))

    assert order() == order("data.workers=2", "engine.zero_stage=3", "optimizer.lr=1")
    others = {order("run.seed=2"), order("data.lanes=4"), order("data.train=${data.eval}")}
    assert len({order(), *others}) == 4
