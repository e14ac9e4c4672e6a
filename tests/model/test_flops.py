import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model import pack
from model.config import ModelConfig
from model.flops import training_flops
from model.heads import LanguageModel

SIZES = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 96,
    "max_positions": 1024,
    "dropout": 0.0,
}
KINDS = [
    {"attention": "softmax"},
    {"attention": "linear"},
    {"attention": "linear", "features": "favor", "num_features": 24},
]


def counted(config, lengths, num_targets, causal):
    model = LanguageModel(config, vocab_size=101, causal=causal)
    positions = torch.cat([torch.arange(length) for length in lengths])
    # the maths backend, for torch's counter has no formula for flash attention on a CPU
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = model.logits(
            torch.zeros_like(positions), positions, lengths, torch.arange(num_targets)
        )
        logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(64, 64), (30, 1, 64, 5), (7,), (129, 129, 1000)])
@pytest.mark.parametrize("num_targets", [1, 5])
def test_counts_what_torch_counts(kind, causal, lengths, num_targets, monkeypatch):
    # a call a piece: what a mask takes away again is computed, but is no useful work
    monkeypatch.setattr(pack, "BLOCK", 0)
    config = ModelConfig(**SIZES, **kind)
    ours = training_flops(config, 101, lengths, num_targets, causal=causal)
    assert ours == counted(config, lengths, num_targets, causal)


@pytest.mark.parametrize("kind", KINDS)
def test_linear_attention_costs_the_same_for_every_token(kind):
    config = ModelConfig(**SIZES, **kind)
    short, long = (training_flops(config, 101, [n], 1, causal=True) / n for n in (1024, 32768))
    assert (long / short < 1.05) == (config.attention == "linear")
