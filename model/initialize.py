"""Initial weights that depend on the seed and a parameter's name, and on nothing else."""

import hashlib

import torch

from model.encoder import RoFormer
from model.heads import LanguageModel


@torch.no_grad()
def initialize(model: RoFormer | LanguageModel, seed: int) -> None:
    """Draw matrices and embeddings from normal(0, initializer_range); biases 0, norms 1.

    Every parameter has a generator of its own, so models with different positions start from the
    same values in all that they share. Values are drawn in fp32 on the CPU whatever the model's
    type and device, one parameter at a time.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            key = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
            values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            parameter.copy_(
                values.normal_(0.0, model.config.initializer_range, generator=generator)
            )
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
