"""How much memory a rank takes: its training state under ZeRO, and what a micro-batch adds.

The state is counted: weights, gradients, fp32 masters and moments, and the buffers in which
DeepSpeed gathers and reduces them. What the forward and backward pass hold is counted as well, by
running the model on tensors without data and following when each lives and dies.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model.config import ModelConfig
from model.heads import LanguageModel
from trainer.config import EngineConfig

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BUCKET = 500_000_000
"""DeepSpeed's default `reduce_bucket_size`, in elements."""
LIVE = 1_000_000_000
"""DeepSpeed's default `stage3_max_live_parameters`, in elements."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at its fullest moment, in a later step."""

    weights: int
    gradients: int
    """Beside the activations, with the buffers that they are reduced or turned to fp32 in."""
    optimizer: int
    """fp32 masters and both moments; on the host under `engine.offload`."""
    activations: int
    runtime: int = 0
    """Python, libraries and the device's own, before there is a model."""
    offloaded: bool = False

    @property
    def state(self) -> int:
        """What does not depend on the batch."""
        return self.weights + self.gradients + self.optimizer

    @property
    def device(self) -> int:
        """All that must fit the rank's device; on a CPU, everything."""
        on_host = self.optimizer if self.offloaded else 0
        return self.runtime + self.state - on_host + self.activations

    def times(self, factor: float) -> "Memory":
        """Return it with a factor over all that is the model's."""
        parts = {name: round(factor * getattr(self, name)) for name in _PARTS}
        return replace(self, **parts)


_PARTS = ("weights", "gradients", "optimizer", "activations")
RUNTIME_MIB = {"cpu": (476, 521), "gpu": (1024, 1024)}
"""Without and with ZeRO: Python, torch 2.13 and deepspeed 0.19 on a CPU; a CUDA context."""


def runtime_bytes(engine: EngineConfig, kind: str) -> int:
    """Return what a rank takes before there is a model."""
    return RUNTIME_MIB[kind][engine.zero_stage > 0] * 2**20


def state_memory(
    num_parameters: int,
    engine: EngineConfig,
    world: int,
    *,
    accumulation: int = 1,
    activations: int = 0,
) -> Memory:
    """Count the training state of one rank (Rajbhandari et al., arXiv 1910.02054, section 5).

    ZeRO-1 parts masters and moments over the ranks, ZeRO-2 gradients as well, ZeRO-3 everything.
    In fp32, ZeRO keeps a second, parted copy of the weights as masters. Seen in deepspeed 0.19
    besides: without ZeRO, gradients take the place of `activations` (bytes) as these go, unless
    those of another micro-batch are there already, and several ranks reduce them in a bucket, as
    bf16 and fp16 copy them to fp32; ZeRO 1 and 2 collect gradients in a bucket and keep the parted
    sum; ZeRO-3 gathers the weights of up to `stage3_max_live_parameters` for its passes, twice for
    a while, beside a whole gradient.
    """
    low, stage = BYTES[engine.precision], engine.zero_stage
    zero = engine.deepspeed.zero_optimization
    bucket = min(num_parameters, zero.reduce_bucket_size or BUCKET)
    masters = 4 if engine.precision != "fp32" or stage > 0 else 0
    optimizer = num_parameters * (8 + masters) / (world if stage else 1)
    whole = float(num_parameters * low)
    weights, parted = whole, whole / world
    if stage == 0:
        kept = whole if accumulation > 1 else max(0.0, whole - activations)
        reduced = bucket * low if world > 1 else 0
        in_fp32 = num_parameters * 4 if low < 4 else 0
        gradients = kept + max(reduced, in_fp32)
    elif stage < 3:
        gradients = bucket * low + parted
    else:
        live = min(num_parameters, zero.stage3_max_live_parameters or LIVE)
        weights = parted + 2 * live * low
        gradients = bucket * low + whole + parted
    return Memory(
        round(weights), round(gradients), round(optimizer), 0, 0, engine.offload != "none"
    )


def activation_bytes(
    model: ModelConfig,
    engine: EngineConfig,
    vocab_size: int,
    lengths: Sequence[int],
    num_targets: int,
    *,
    causal: bool = False,
    max_targets: int | None = None,
) -> int:
    """Count the most bytes that a forward and backward pass hold, beside weights and gradients.

    Two and three layers are run, and what the third adds counts for each further one.
    """
    few, more = (
        _peak(
            model.model_copy(update={"num_layers": layers}),
            engine,
            vocab_size,
            lengths,
            num_targets,
            causal,
            max_targets,
        )
        for layers in (2, 3)
    )
    return few + (model.num_layers - 2) * (more - few)


class _Live(TorchDispatchMode):
    """Adds up the storages that live, and remembers the most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def leave_out(self, tensor: Tensor) -> None:
        """Count a tensor's storage as somebody else's."""
        self._seen[tensor.untyped_storage()] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage() not in self._seen:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: Any) -> None:
        size = storage.nbytes()
        self._seen[storage] = True
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size


def _peak(
    config: ModelConfig,
    engine: EngineConfig,
    vocab_size: int,
    lengths: Sequence[int],
    num_targets: int,
    causal: bool,
    max_targets: int | None,
) -> int:
    """Run one pass on tensors without data."""
    live = _Live()
    with FakeTensorMode():
        model = LanguageModel(
            config,
            vocab_size=vocab_size,
            causal=causal,
            checkpoint_layers=engine.activation_checkpointing,
            max_targets=max_targets,
        )
        for parameter in model.parameters():
            parameter.data = parameter.data.to(DTYPES[engine.precision])
            live.leave_out(parameter)
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
        ids = torch.zeros(sum(lengths), dtype=torch.int64)
        asked = torch.zeros(num_targets, dtype=torch.int64)
        with live:
            loss = model(ids, ids, tuple(lengths), asked, asked)
            loss.total.backward()
    return live.peak


def _drop_gradient(parameter: nn.Parameter) -> None:
    parameter.grad = None
