"""Packs, fp64 references and errors in units of the last place, for every form of the kernel."""

import numpy as np
import torch
from torch import Tensor

from model.positions import angles

P = 1536
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def positions_of(num_tokens: int, seed: int = 0) -> Tensor:
    """Return positions of a pack of many documents of length 1, after the end of a long one."""
    rng = np.random.default_rng(seed)
    lengths = [num_tokens - num_tokens // 3]
    while sum(lengths) < num_tokens:
        lengths.append(min(int(rng.choice([1, 1, 2, 31])), num_tokens - sum(lengths)))
    positions = np.concatenate([np.arange(length) for length in lengths])
    positions[: lengths[0]] += 37
    return torch.from_numpy(positions)


def turns_of(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    angles_PR = angles(P, size, 10000.0)
    return torch.from_numpy(np.stack([np.cos(angles_PR), np.sin(angles_PR)], axis=-1)).to(dtype)


def pack(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x: Tensor, positions: Tensor, size: int, *, halves: bool = False) -> Tensor:
    """Turn [T, N, H, D] by complex exponentials of fp64 angles; negative positions turn back."""
    x_TNHD, half = x.detach().double().numpy(), size // 2
    theta = 10000.0 ** (-2 * np.arange(half) / size)
    turns = np.exp(1j * positions.numpy()[:, None] * theta)[:, None, None]
    first = slice(0, half) if halves else slice(0, size, 2)
    second = slice(half, size) if halves else slice(1, size, 2)
    turned = (x_TNHD[..., first] + 1j * x_TNHD[..., second]) * turns
    out = x_TNHD.copy()
    out[..., first], out[..., second] = turned.real, turned.imag
    return torch.from_numpy(out)


def exact_packed(x: Tensor, positions: Tensor, size: int, *, halves: bool = False) -> Tensor:
    """Turn q and k of [T, 3, H, D], and leave v."""
    turned = exact(x[:, :2], positions, size, halves=halves)
    return torch.cat([turned, x[:, 2:].detach().double()], dim=1)


def error(result: Tensor, expected: Tensor) -> float:
    """Return the largest error: absolute for fp32 and fp64, else in ulps of the expected values.

    1e-6, what fp32 maths may be off by, is forgiven: without that, ulps of values near 0 count.
    """
    off = (result.detach().double() - expected).abs()
    if result.dtype in (torch.float32, torch.float64):
        return off.max().item()
    eps = torch.finfo(result.dtype).eps
    ulp = eps * 2.0 ** expected.abs().clamp(min=2.0**-14).log2().floor()
    return ((off - 1e-6).clamp(min=0) / ulp).max().item()
