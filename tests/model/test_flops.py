import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model.config import ModelConfig
from model.flops import training_flops
from model.heads import LanguageModel

SIZES = ModelConfig(
    num_layers=3, hidden_size=32, num_heads=2, intermediate_size=96, max_positions=64, dropout=0.0
)


@pytest.mark.parametrize("lengths", [(64, 64), (30, 1, 64, 5), (7,)])
@pytest.mark.parametrize("num_targets", [1, 5])
def test_counts_what_torch_counts(lengths, num_targets):
    model = LanguageModel(SIZES, vocab_size=101)
    positions = torch.cat([torch.arange(length) for length in lengths])
    # the maths backend, for torch's counter has no formula for flash attention on a CPU
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = model(torch.zeros_like(positions), positions, lengths, torch.arange(num_targets))
        logits.sum().backward()
    assert training_flops(SIZES, 101, lengths, num_targets) == counter.get_total_flops()
