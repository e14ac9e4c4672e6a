"""Rotary forms beside each other: what one layer pays, forward and backward.

    python -m tests.benchmarks.rotary [--tokens 2048] [--dtype fp32 bf16] [--json results.json]

Every form takes the packed projection [T, 3, H, D] and gives q, k and v, q and k turned, and on the
way back the packed gradient. A time is that of one pass over one layer; the buffers are made
before, as the projection would make them.

- fused: `model.kernels.rotary`, as the model calls it (Triton on CUDA, in place on a CPU)
- eager: the formula by pairs with cos and sin in fp32, as one would write it
- complex: pairs as complex numbers, out of place, as torchtitan does
- huggingface: RoFormer's own function, on [B, H, L, D] with tables of the data's type

Times by the processor's clock of one thread on a CPU, so that others on the machine do not count.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from model.config import ModelConfig
from model.positions import RotaryPositions, angles
from tests.benchmarks.timing import (
    Time,
    alternate,
    cpu,
    print_table,
    ratio,
    repeats_for,
    set_threads,
    timed,
    wall,
    write_json,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HEADS, SIZE, LENGTH = 12, 64, 512
Form = Callable[[Tensor], tuple[Tensor, ...]]


def forms(tokens: int, dtype: torch.dtype, device: torch.device) -> dict[str, Form]:
    """Return each form as a function of the packed projection, its tables made."""
    length = min(LENGTH, tokens)
    positions = torch.arange(tokens, device=device) % length
    config = ModelConfig(hidden_size=HEADS * SIZE, num_heads=HEADS, max_positions=length)
    rotation = RotaryPositions(config).rotation(positions)
    angles_PR = torch.from_numpy(angles(length, SIZE, config.rope_base)).to(device)
    cos_T1R, sin_T1R = (f(angles_PR)[positions, None].float() for f in (torch.cos, torch.sin))
    turns_T1R = torch.complex(cos_T1R, sin_T1R)
    sinusoidal = torch.cat([angles_PR.sin(), angles_PR.cos()], dim=-1).to(dtype)[None, None]

    def fused(qkv: Tensor) -> tuple[Tensor, ...]:
        return rotation.split(qkv)

    def eager(qkv: Tensor) -> tuple[Tensor, ...]:
        q, k, v = qkv.unbind(1)
        return *(by_pairs(x) for x in (q, k)), v

    def by_pairs(x: Tensor) -> Tensor:
        a, b = x[..., ::2], x[..., 1::2]
        turned = (a * cos_T1R - b * sin_T1R, b * cos_T1R + a * sin_T1R)
        return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)

    def as_complex(qkv: Tensor) -> tuple[Tensor, ...]:
        q, k, v = qkv.unbind(1)
        return *(by_complex(x) for x in (q, k)), v

    def by_complex(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns_T1R).flatten(-2).to(x.dtype)

    found = {"fused": fused, "eager": eager, "complex": as_complex}
    try:
        from transformers.models.roformer.modeling_roformer import RoFormerSelfAttention
    except ImportError:
        return found

    def huggingface(qkv: Tensor) -> tuple[Tensor, ...]:
        by_row = qkv.unflatten(0, (-1, length)).transpose(1, 3)  # [B, H, 3, L, D]
        q, k, v = by_row.unbind(2)
        q, k = RoFormerSelfAttention.apply_rotary_position_embeddings(sinusoidal, q, k)
        return tuple(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))

    return {**found, "huggingface": huggingface}


def passes(form: Form, qkv: Tensor, gradient: Tensor) -> tuple[Callable[[], object], ...]:
    """Return one forward, and one backward pass of it."""
    # no leaves, as the projection's output is none; and two, since one form writes over its own
    once, again = (qkv.clone().requires_grad_() * 1.0 for _ in range(2))
    outputs = form(once)
    gradients = gradient.unbind(1)

    def forward() -> object:
        return form(again)

    def backward() -> object:
        return torch.autograd.grad(outputs, once, gradients, retain_graph=True)

    return forward, backward


def measure(
    tokens: int, dtype_name: str, device: torch.device, *, turns: int, seconds: float
) -> list[dict[str, object]]:
    """Return a row a form and direction, beside the fused one's time."""
    tokens -= tokens % min(LENGTH, tokens)
    dtype = DTYPES[dtype_name]
    qkv = torch.randn(tokens, 3, HEADS, SIZE, device=device).to(dtype)
    gradient = torch.randn(tokens, 3, HEADS, SIZE, device=device).to(dtype)
    times: dict[str, dict[str, list[Time]]] = {"forward": {}, "backward": {}}
    built = {n: passes(f, qkv, gradient) for n, f in forms(tokens, dtype, device).items()}
    for direction, works in zip(times, zip(*built.values(), strict=True), strict=True):
        sides = {}
        for name, work in zip(built, works, strict=True):
            repeats = repeats_for(work, seconds)
            sides[name] = lambda turn, work=work, repeats=repeats: timed(work, repeats)
        times[direction] = alternate(sides, turns)
    clock = wall if device.type == "cuda" else cpu
    return [
        {
            "dtype": dtype_name,
            "device": device.type,
            "tokens": tokens,
            "form": name,
            **{
                direction: ratio(clock(by_form[name]), clock(by_form["fused"]))
                for direction, by_form in times.items()
            },
            "both": ratio(
                [a + b for a, b in zip(*(clock(t[name]) for t in times.values()), strict=True)],
                [a + b for a, b in zip(*(clock(t["fused"]) for t in times.values()), strict=True)],
            ),
            "us_a_layer": 1e6 * sum(min(clock(by_form[name])) for by_form in times.values()),
        }
        for name in built
    ]


def main() -> None:
    """Measure on the CPU, and on a GPU where there is one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.2, help="length of a turn")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    set_threads(1)
    devices = [torch.device("cpu")] + [torch.device("cuda")] * torch.cuda.is_available()
    rows = [
        row
        for device in devices
        for dtype in arguments.dtype
        for row in measure(
            arguments.tokens, dtype, device, turns=arguments.turns, seconds=arguments.seconds
        )
    ]
    print_table(
        ["type", "device", "form", "forward, x fused", "backward", "both"],
        [
            [row[k] for k in ("dtype", "device", "form", "forward", "backward", "both")]
            for row in rows
        ],
    )
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
