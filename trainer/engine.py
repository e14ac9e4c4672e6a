"""DeepSpeed, behind the five things that training asks of it; the only module that imports it.

What is handled here and nowhere else (measured with deepspeed 0.19):
- its dict is made in one pure function, `deepspeed_config`;
- DeepSpeed's own batch counts micro-batches: with a micro-batch of "1", the accumulation of a
  stage is set by `set_train_batch_size(accumulation * world)`;
- it averages gradients over ranks and micro-batches, so `backward` takes the loss as a share of
  the whole step's and undoes both averages;
- no C++ is compiled at start: torch's AdamW is passed in, and the shared-memory op, which serves
  inference only, is declared incompatible;
- parameters and optimizer state are read and written whole and in fp32, under their names, so
  what a checkpoint holds is the same for every ZeRO stage, precision and world.
"""

import datetime
import logging
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model.encoder import Layer
from trainer.config import EngineConfig, OptimizerConfig
from trainer.distributed import World, device_of, free_port

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
# deepspeed's autotuner, which nothing here asks for, imports MLflow: half of what a start waits for
without_mlflow = {} if "mlflow" in sys.modules else {"mlflow": None}
sys.modules.update(without_mlflow)  # type: ignore[arg-type]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecations inside deepspeed's own imports
    import deepspeed
    import deepspeed.ops
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_optimizer_state,
        set_z3_leaf_modules,
    )
for name in without_mlflow:
    del sys.modules[name]

log = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's running averages of the gradient and of its square."""
LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What DeepSpeed's two classes of loss scales, with ZeRO and without, change as they go."""


def init_distributed(world: World, *, timeout_s: int) -> None:
    """Form the process group of all ranks (NCCL on GPUs, gloo on CPUs)."""
    # deepspeed calls collectives by the names that torch 2.13 deprecates, at every step
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if world.size == 1:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        os.environ.update({name: os.environ.get(name, v) for name, v in (alone | here).items()})
    for lock in build_locks() if world.is_first else ():
        log.warning(
            "%s: left by a build of torch's that was killed, or runs; training builds "
            "nothing and does not wait for it; remove it where none runs",
            lock,
        )
    try:
        deepspeed.init_distributed(
            auto_mpi_discovery=False, verbose=False, timeout=datetime.timedelta(seconds=timeout_s)
        )
    except torch.distributed.DistNetworkError as error:
        text = str(error).splitlines()[0]
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        if "EADDRINUSE" in str(error) or "in use" in text:
            text = "another process has this port; choose another (MASTER_PORT, --master_port)"
        raise ValueError(f"no ranks' meeting at {place}: {text}") from None


def build_locks() -> list[Path]:
    """Return the lock files of builds of torch extensions: other programs wait for one for ever."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    root = Path(named) if named else Path.home() / ".cache" / "torch_extensions"
    return sorted({*root.glob("*/lock"), *root.glob("*/*/lock")})


def deepspeed_config(
    engine: EngineConfig, optimizer: OptimizerConfig, *, accumulation: int, world: int
) -> dict[str, Any]:
    """Make DeepSpeed's dict; keys of `engine.deepspeed` are laid over ours, level by level."""
    zero: dict[str, Any] = {"stage": engine.zero_stage}
    if engine.offload == "optimizer":
        zero["offload_optimizer"] = {"device": "cpu"}
    ours = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": accumulation * world,
        # without ZeRO in fp32 `Engine.step` clips, which needs the norm anyway
        "gradient_clipping": 0.0 if _is_plain(engine) else optimizer.clip_norm,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
    if engine.precision == "bf16":
        ours["bf16"] = {"enabled": True, "check_grad_overflow": True}
    if engine.precision == "fp16":
        ours["fp16"] = {"enabled": True}
    return _overlaid(ours, engine.deepspeed.model_dump())


def _is_plain(engine: EngineConfig) -> bool:
    """Whether DeepSpeed leaves AdamW as it is."""
    return engine.zero_stage == 0 and engine.precision == "fp32"


def _overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _overlaid(old, value) if isinstance(old, dict) else value
    return merged


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split parameters as the paper's code does: embeddings, norms and biases don't decay."""
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in module.parameters():
        matrix = parameter.ndim >= 2 and id(parameter) not in embeddings
        (decayed if matrix else plain).append(parameter)
    groups = [(decayed, weight_decay), (plain, 0.0)]
    return [{"params": p, "weight_decay": decay} for p, decay in groups if p]


class Engine:
    """A module under DeepSpeed: forward, backward, step, and its whole state by name."""

    def __init__(
        self,
        module: nn.Module,
        *,
        engine: EngineConfig,
        optimizer: OptimizerConfig,
        world: World,
        max_accumulation: int,
    ) -> None:
        self.world = world
        self.device = device_of(world)
        self.zero_stage = engine.zero_stage
        self._scales_loss = engine.precision == "fp16"
        adamw = torch.optim.AdamW(
            parameter_groups(module, optimizer.weight_decay),
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            fused=True,  # one pass over parameter, gradient and moments, on CPUs too
        )
        config = deepspeed_config(
            engine, optimizer, accumulation=max_accumulation, world=world.size
        )
        if engine.zero_stage == 3:
            # A layer's parameters come and go together: fewer, larger collectives, and no hooks
            # within what torch.compile makes of a layer.
            set_z3_leaf_modules(module, [Layer], raise_if_not_found=False)
        self._engine, *_ = deepspeed.initialize(model=module, optimizer=adamw, config=config)
        self._accumulation = max_accumulation
        self._update, self._skips = adamw.step, False
        adamw.step = self._update_unless_skipped  # type: ignore[method-assign]
        self._clip_norm = optimizer.clip_norm if _is_plain(engine) else 0.0
        if engine.zero_stage == 0 and world.size == 1:  # it would copy all gradients, twice
            self._engine.enable_backward_allreduce = False

    @property
    def module(self) -> nn.Module:
        """The module itself."""
        module: nn.Module = self._engine.module
        return module

    # -- training ------------------------------------------------------------------------------

    def set_accumulation(self, accumulation: int) -> None:
        """Set the number of forward and backward passes that make a step."""
        self._engine.set_train_batch_size(accumulation * self.world.size)
        self._engine.micro_steps = 0  # a step ends where this is a multiple of the *new* number
        if hasattr(self._engine.optimizer, "gradient_accumulation_steps"):
            self._engine.optimizer.gradient_accumulation_steps = accumulation
        self._accumulation = accumulation

    def train(self, mode: bool = True) -> None:
        """Turn dropout on, or off for evaluation."""
        self._engine.train(mode)

    def forward(self, *inputs: Any) -> Any:
        """Run the module."""
        return self._engine(*inputs)

    def backward(self, total: Tensor, global_count: float) -> None:
        """Add the gradient of `total` / `global_count`, summed over ranks and micro-batches.

        Args:
            total: Sum of the losses of this micro-batch's targets, a scalar.
            global_count: Targets of the whole step, over all ranks and micro-batches.
        """
        share = total * (self._accumulation * self.world.size / max(global_count, 1.0))
        self._engine.backward(share)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()  # counts the micro-batch

    def step(self, lr: float, *, skip: bool = False) -> float:
        """After the last backward pass of a step: clip, update, clear the gradients.

        Where the gradient is not finite on any rank, or with `skip`, which all ranks must give
        alike, parameters and optimizer stay as they are. DeepSpeed sees to the first but in fp32
        without ZeRO, where it would put the NaN into every weight.

        Returns:
            The 2-norm of the whole gradient before clipping; NaN or infinite where it was skipped
            for that.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        norm: float | None = None
        if self._engine.optimizer is self._engine.basic_optimizer:  # ZeRO 0 in fp32 reports none
            gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
            whole = torch.nn.utils.get_total_norm(gradients)
            norm = float(whole)
            skip = skip or not math.isfinite(norm)
            if not skip:
                self._clip(whole)
        self._skips = skip
        self._engine.step()
        reported = self._engine.get_global_grad_norm()
        return float(reported if norm is None and reported is not None else norm or 0.0)

    def _clip(self, norm: Tensor) -> None:
        if self._clip_norm:
            parameters = self._engine.module.parameters()
            torch.nn.utils.clip_grads_with_norm_(parameters, self._clip_norm, norm)

    def _update_unless_skipped(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for AdamW's step, which every ZeRO stage calls once or more a step."""
        return None if self._skips else self._update(*args, **kwargs)

    def is_sound(self, grad_norm: float) -> bool:
        """Whether a step was made, or was skipped only to find fp16 a smaller loss scale."""
        return math.isfinite(grad_norm) or self._scales_loss

    # -- state ---------------------------------------------------------------------------------

    def gather_state(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield each parameter's name with its fp32 value and Adam moments, whole, on the CPU.

        Every rank must iterate to the end: the parts of a parameter are collected from all.
        """
        self._link_moments()
        for name, parameter in self._engine.module.named_parameters():
            tensors = {"value": self._full(parameter, None)}
            if self.optimizer_steps:
                tensors |= {moment: self._full(parameter, moment) for moment in MOMENTS}
            yield name, {kind: t.detach().to("cpu", torch.float32) for kind, t in tensors.items()}

    @property
    def optimizer_steps(self) -> int:
        """Updates that Adam has made, as its bias correction counts them."""
        states = self._engine.basic_optimizer.state.values()
        return max((int(state["step"]) for state in states if "step" in state), default=0)

    @property
    def loss_scale(self) -> dict[str, float]:
        """The scale of fp16's loss, and the counters by which it moves; empty in others."""
        scaler = self._loss_scaler()
        return {key: getattr(scaler, key) for key in LOSS_SCALE if hasattr(scaler, key)}

    def restore_loss_scale(self, saved: Mapping[str, float]) -> None:
        """Put back what `loss_scale` gave, where this precision has one."""
        scaler = self._loss_scaler()
        for key, value in saved.items():
            if hasattr(scaler, key):
                setattr(scaler, key, value)

    def _loss_scaler(self) -> Any:
        optimizer = self._engine.optimizer
        if not self._scales_loss:
            return None
        return getattr(optimizer, "loss_scaler", None) or optimizer.loss_scale_config

    def restore_state(
        self, state: Mapping[str, Mapping[str, Tensor]], optimizer_steps: int
    ) -> None:
        """Put back what `gather_state` gave, on any world, ZeRO stage or precision.

        The module must have been built with the same values (its low-precision copy is made
        from them when the engine is built).
        """
        if optimizer_steps:
            self._create_moments(optimizer_steps)
        with torch.no_grad():
            for name, parameter in self._engine.module.named_parameters():
                self._set_full(parameter, state[name]["value"], None)
                for moment in MOMENTS if optimizer_steps else ():
                    self._set_full(parameter, state[name][moment], moment)

    def _create_moments(self, optimizer_steps: int) -> None:
        """Make Adam's state, which torch creates only at the first step."""
        adamw = self._engine.basic_optimizer
        parts = [part for group in adamw.param_groups for part in group["params"]]
        # ZeRO-3 hands its flat parts to Adam one at a time, within each step
        for part in getattr(self._engine.optimizer, "fp32_partitioned_groups_flat", parts):
            adamw.state[part] = {
                "step": torch.tensor(float(optimizer_steps)),
                **{moment: torch.zeros_like(part) for moment in MOMENTS},
            }
        self._link_moments()

    def _link_moments(self) -> None:
        """Let ZeRO 1 and 2 find Adam's state by parameter.

        They do so by themselves once, after the first parameter group's first step, when the
        other groups have no state yet, and never again.
        """
        optimizer = self._engine.optimizer
        if self.optimizer_steps and hasattr(optimizer, "_hp_optimizer_states_linked"):
            optimizer._hp_optimizer_states_linked = False
            optimizer._lazy_init_hp_params_optimizer_state()

    def _full(self, parameter: nn.Parameter, moment: str | None) -> Tensor:
        if self.zero_stage:
            full = (
                safe_get_full_fp32_param(parameter)
                if moment is None
                else safe_get_full_optimizer_state(parameter, moment)
            )
            return full.reshape(getattr(parameter, "ds_shape", parameter.shape))
        master = self._masters().get(parameter, parameter)
        return master if moment is None else self._engine.basic_optimizer.state[master][moment]

    def _set_full(self, parameter: nn.Parameter, value: Tensor, moment: str | None) -> None:
        value = value.to(self.device)
        if self.zero_stage == 3:
            # DeepSpeed's own setter refuses sizes that don't divide over the ranks
            size = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
            flat = nn.functional.pad(value.flatten(), (0, size * self.world.size - value.numel()))
            part = flat.narrow(0, size * self.world.rank, size)
            if moment is None:
                safe_set_local_fp32_param(parameter, part)
            else:
                safe_set_local_optimizer_state(parameter, part, moment)
        elif self.zero_stage:
            if moment is None:
                safe_set_full_fp32_param(parameter, value)
            else:
                safe_set_full_optimizer_state(parameter, value, moment)
        else:
            master = self._masters().get(parameter, parameter)
            target = (
                master if moment is None else self._engine.basic_optimizer.state[master][moment]
            )
            target.copy_(value)

    def _masters(self) -> dict[nn.Parameter, Tensor]:
        """Return the fp32 master of each low-precision parameter (ZeRO 0 under bf16 or fp16)."""
        optimizer = self._engine.optimizer
        if not hasattr(optimizer, "fp16_groups"):
            return {}
        pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        return {lp: hp for lps, hps in pairs for lp, hp in zip(lps, hps, strict=True)}
