"""Small models with weights that hide nothing, and packs of documents."""

from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig
from model.heads import LanguageModel

VOCAB = 61
KINDS = ("rope", "learned", "sinusoidal", "none")


def small_config(**changes: Any) -> ModelConfig:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48}
    return ModelConfig(**{**sizes, "max_positions": 64, "dropout": 0.0, **changes})


def scatter_weights(module: torch.nn.Module, seed: int = 0) -> None:
    """Give every parameter a value that shows in the result, biases and norms included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.25 * noise + name.lower().endswith("norm.weight"))


def small_model(
    *,
    seed: int = 0,
    causal: bool = False,
    checkpoint_layers: bool = False,
    compile_layers: bool = False,
    dtype: torch.dtype = torch.float64,
    **changes: Any,
) -> LanguageModel:
    model = LanguageModel(
        small_config(**changes),
        vocab_size=VOCAB,
        causal=causal,
        checkpoint_layers=checkpoint_layers,
        compile_layers=compile_layers,
    )
    scatter_weights(model, seed)
    return model.to(dtype)


def document(length: int, seed: int) -> Tensor:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def restarting(lengths: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.arange(length) for length in (0, *lengths)])


def logits(model: LanguageModel, *documents: Tensor) -> list[Tensor]:
    """Return the logits of all tokens of each document, packed in this order."""
    lengths = tuple(len(ids) for ids in documents)
    ids = torch.cat(documents)
    with torch.no_grad():
        out = model.logits(ids, restarting(lengths), lengths, torch.arange(len(ids)))
    return list(out.split(lengths))


def difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a.double() - b.double()).abs().max().item()
