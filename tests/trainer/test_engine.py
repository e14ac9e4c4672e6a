import pytest
import torch

from model.config import ModelConfig
from model.heads import LanguageModel
from trainer.config import (
    Bf16Keys,
    CommsLoggerKeys,
    DeepSpeedKeys,
    EngineConfig,
    Fp16Keys,
    OptimizerConfig,
    ZeroKeys,
)
from trainer.engine import deepspeed_config, parameter_groups


def make(accumulation=3, world=2, **settings):
    engine = EngineConfig.model_validate(settings)
    return deepspeed_config(
        engine, OptimizerConfig(clip_norm=0.5), accumulation=accumulation, world=world
    )


def test_the_dict_states_batch_clipping_and_stage():
    made = make(zero_stage=2)
    assert made["train_batch_size"] == 6
    assert made["gradient_accumulation_steps"] == 3
    assert made["gradient_clipping"] == 0.5
    assert made["zero_optimization"] == {"stage": 2}
    assert "bf16" not in made
    assert make(zero_stage=0)["gradient_clipping"] == 0  # AdamW is plain there: the engine clips
    assert make(zero_stage=0, precision="bf16")["gradient_clipping"] == 0.5
    assert make(precision="bf16")["bf16"] == {
        "enabled": True,
        "check_grad_overflow": True,  # DeepSpeed's default lets a NaN into the weights
    }


def test_further_keys_lie_over_ours_level_by_level():
    made = make(
        zero_stage=1,
        offload="optimizer",
        precision="bf16",
        deepspeed={
            "zero_optimization": {"reduce_bucket_size": 1000},
            "bf16": {"check_grad_overflow": True},
            "wall_clock_breakdown": True,
        },
    )
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 1000}
    assert made["zero_optimization"] == zero
    assert made["bf16"] == {"enabled": True, "check_grad_overflow": True}
    assert made["wall_clock_breakdown"] is True


def test_every_key_we_pass_on_is_one_that_deepspeed_knows():
    """Its top level takes any key in silence, so ours are looked up in its source."""
    import inspect

    import deepspeed.comm.constants
    import deepspeed.runtime.constants
    import deepspeed.runtime.precision_config
    import deepspeed.runtime.zero.config
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime import precision_config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    def names(model):
        aliases = {field.alias for field in model.model_fields.values() if field.alias}
        return set(model.model_fields) | aliases

    blocks = {
        ZeroKeys: DeepSpeedZeroConfig,
        Bf16Keys: precision_config.DeepSpeedBF16Config,
        Fp16Keys: precision_config.DeepSpeedFP16Config,
        CommsLoggerKeys: CommsLoggerConfig,
    }
    for ours, theirs in blocks.items():
        assert set(ours.model_fields) <= names(theirs), ours
        assert "gradient_cliping" not in names(theirs)
    modules = (
        deepspeed.comm.constants,
        deepspeed.runtime.constants,
        deepspeed.runtime.precision_config,
        deepspeed.runtime.zero.config,
    )
    text = "".join(map(inspect.getsource, modules)).replace("'", '"')
    for key in DeepSpeedKeys.model_fields:
        assert f'"{key}"' in text, key
    assert '"gradient_cliping"' not in text


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_norms_biases_and_embeddings_do_not_decay(positions):
    config = ModelConfig(
        positions=positions, num_layers=2, hidden_size=16, num_heads=2, intermediate_size=32
    )
    model = LanguageModel(config, vocab_size=31)
    groups = parameter_groups(model, 0.01)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, plain = ({names[id(p)] for p in group["params"]} for group in groups)
    assert decayed | plain == set(names.values())
    assert not decayed & plain
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0]
    for name in decayed:
        assert name.endswith("weight")
        assert not any(word in name for word in ("norm", "embeddings"))
    for word in ("words", "token_types", "norm.weight", "bias"):
        assert any(word in name for name in plain)
    assert sum(p.numel() for g in groups for p in g["params"]) == sum(
        p.numel() for p in model.parameters()
    )
    assert torch.is_tensor(groups[0]["params"][0])
