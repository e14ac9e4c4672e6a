"""Machines that are not at hand: what their devices can do, and how long a step takes on many.

The model: matrix products run at EFFICIENCY of the device's dense peak; what ranks exchange runs at
the bandwidth of a ring, over the devices' own links within a machine, over its network between
machines; nothing of it hides behind computation. A published run to compare with, in the tests:
Megatron-DeepSpeed's BERT of 1.3 B parameters on 64 A100, at 145 TFLOP/s a GPU.
"""

from dataclasses import dataclass

from trainer.config import EngineConfig

EFFICIENCY = 0.5
"""Share of the dense peak that a large transformer's forward and backward pass reach."""
LINK_SHARE = 0.9
"""Share of a link's rate that collectives reach."""


@dataclass(frozen=True)
class Device:
    """An accelerator, in machines of several."""

    half_flops: float
    """Dense FLOP/s in bf16 (fp16 on a V100)."""
    single_flops: float
    """Dense FLOP/s in fp32 as torch computes it by default, without TF32."""
    memory_gib: float
    link_bytes: float
    """Bytes a second that it can send to the others of its machine."""
    network_bytes: float
    """Bytes a second of its share of the machine's network."""
    per_machine: int = 8


DEVICES = {
    "v100": Device(125e12, 15.7e12, 32, 150e9, 3.1e9),
    "a100-40": Device(312e12, 19.5e12, 40, 300e9, 25e9),
    "a100": Device(312e12, 19.5e12, 80, 300e9, 25e9),
    "h100": Device(989e12, 67e12, 80, 450e9, 50e9),
    "h200": Device(989e12, 67e12, 141, 450e9, 50e9),
    "b200": Device(2250e12, 80e12, 180, 900e9, 50e9),
}
"""From their makers' data sheets; machines of eight as sold, with a network port a device."""


def communication_bytes(
    num_parameters: int, engine: EngineConfig, *, world: int, accumulation: int, size: int
) -> int:
    """Return the bytes that one rank sends in a step, over a ring of `world` ranks.

    A ring's all-reduce sends 2 (w-1)/w of what is reduced, a reduce-scatter or all-gather half of
    that. Without ZeRO and in ZeRO-1 gradients are reduced once a step, in ZeRO 2 and 3 after each
    micro-batch; ZeRO-3 gathers the weights for each forward and each backward pass.
    `size`: bytes of one weight or gradient.
    """
    gradients = {0: 2, 1: 1, 2: accumulation, 3: accumulation}[engine.zero_stage]
    weights = {0: 0, 1: 1, 2: 1, 3: 2 * accumulation}[engine.zero_stage]
    return round((gradients + weights) * num_parameters * size * (world - 1) / world)


def step_seconds(device: Device, *, flops: float, sent: int, world: int, precision: str) -> float:
    """Return the time of a step of `flops` operations in all, and `sent` bytes of each rank."""
    peak = device.single_flops if precision == "fp32" else device.half_flops
    compute = flops / (world * peak * EFFICIENCY)
    # rings pass through a machine's devices, and leave it by all its ports at once
    machines = -(-world // device.per_machine)
    ports = min(world, device.per_machine) * device.network_bytes
    rate = device.link_bytes if machines == 1 else min(device.link_bytes, ports)
    return compute + sent / (rate * LINK_SHARE)
