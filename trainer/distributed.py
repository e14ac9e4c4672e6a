"""This process's place among the ranks, and the few collectives that training needs.

The only module of the trainer that reads the environment: the launchers (deepspeed, torchrun) tell
a rank its place by variables.
"""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a run, and this one among them."""

    rank: int
    size: int
    local_rank: int
    local_size: int = 1
    """Ranks on this machine."""

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what the run writes once."""
        return self.rank == 0


def number_in(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a number from 0 on that a launcher has set.

    Raises:
        ValueError: With the variable, if it is none, or if it is absent and has no default.
    """
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal():
        raise ValueError(f"the environment has {name}={text!r}, which is no number")
    return int(text)


def world_from_environment() -> World:
    """Read the launcher's variables; without them this process is the whole world.

    Raises:
        ValueError: If a launcher set some of them but not all, or what makes no sense.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    present = [name for name in names if name in os.environ]
    if "RANK" not in present and "WORLD_SIZE" not in present:
        return World(rank=0, size=1, local_rank=0)
    if missing := [name for name in names if name not in present]:
        raise ValueError(
            f"the environment has {', '.join(present)} but not {', '.join(missing)}: "
            "start ranks by `roformer train`, deepspeed or torchrun"
        )
    rank, size, local_rank, _ = (
        number_in(os.environ, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    )
    if rank >= size:
        raise ValueError(f"the environment has RANK={rank}, but WORLD_SIZE={size}")
    local_size = number_in(os.environ, "LOCAL_WORLD_SIZE", number_in(os.environ, "LOCAL_SIZE", 1))
    return World(rank, size, local_rank, local_size)


def in_world() -> bool:
    """Whether a launcher started this process as one of its ranks."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def share_cores(world: World) -> None:
    """Give each rank of a machine its share of the cores, where the launcher did not."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_size))


def free_port() -> int:
    """Return a TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def device_of(world: World) -> torch.device:
    """Return the rank's device: its own GPU, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", world.local_rank)
    return torch.device("cpu")


def sum_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Sum numbers over all ranks, in fp64; every rank gets the same sums."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return [float(value) for value in total.tolist()]


def gather_from_ranks(item: T) -> list[T]:
    """Collect a small object of every rank, in rank order, on every rank."""
    items: list[T] = [item] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def barrier() -> None:
    """Wait for all ranks."""
    dist.barrier()


def from_first(make: Callable[[], T]) -> T:
    """Return, on every rank, what the first rank makes; it must not raise."""
    return gather_from_ranks(make() if dist.get_rank() == 0 else None)[0]  # type: ignore[return-value]
