"""What launchers tell a rank by variables: torchrun and deepspeed, Slurm's srun, Open MPI's mpirun.

Torch reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. srun and mpirun have words of
their own, which are put into torch's here. A start with another number of ranks than was meant is
refused: launchers that lose their list of machines start a world of one without a word.
"""

import re
import socket
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import psutil

from configs.schema import LaunchConfig
from launch.hostfile import read_hostfile
from trainer.distributed import number_in

RANKS = "ROFORMER_RANKS"
"""Variable by which `roformer` and its scripts say how many ranks they start."""


def adopt(environ: MutableMapping[str, str]) -> None:
    """Put what srun or mpirun say into torch's words; torch's own, where they are, come first.

    Raises:
        ValueError: If a launcher left out what is needed, or a number is none.
    """
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        if "OMPI_COMM_WORLD_RANK" in environ:
            environ.update(_from_open_mpi(environ))
        elif environ.get("SLURM_STEP_ID", "").isdecimal() and "SLURM_PROCID" in environ:
            environ.update(_from_slurm(environ))
    if _num_hosts(environ) > 1 and "GLOO_SOCKET_IFNAME" not in environ:
        interface = interface_towards(environ.get("MASTER_ADDR", ""))
        if interface is not None:
            environ["GLOO_SOCKET_IFNAME"] = interface


def expected_ranks(launch: LaunchConfig, environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Return how many ranks were meant, and who says so; None where nobody does.

    Raises:
        ValueError: If ROFORMER_RANKS is no number, or the hostfile none.
    """
    if RANKS in environ:
        return number_in(environ, RANKS), RANKS
    if launch.nodes > 1 and launch.num_processes != "auto":
        world = launch.nodes * launch.num_processes
        return world, f"launch.nodes={launch.nodes} x launch.num_processes={launch.num_processes}"
    if launch.hostfile is not None:
        hosts = read_hostfile(Path(launch.hostfile))
        return sum(len(host.slots) for host in hosts), f"launch.hostfile={launch.hostfile}"
    return None


def check_ranks(size: int, launch: LaunchConfig, environ: Mapping[str, str]) -> None:
    """Refuse a world of another size than was meant.

    Raises:
        ValueError: With both numbers and what to do.
    """
    expected = expected_ranks(launch, environ)
    processes = launch.num_processes
    if expected is None and size == 1 and processes not in (1, "auto"):
        expected = int(processes), f"launch.num_processes={processes}"
    if expected is not None:
        number, source = expected
        if size != number:
            raise ValueError(
                f"{size} rank{'s' * (size > 1)} started, and {number} were meant ({source}): look "
                f"for a launcher without its list of machines; or set {RANKS}={size}"
            )
        return
    nodes, tasks = (number_in(environ, f"SLURM_{k}", 1) for k in ("JOB_NUM_NODES", "NTASKS"))
    in_step = environ.get("SLURM_STEP_ID", "").isdecimal()
    if size < nodes or (size == 1 and tasks > 1 and not in_step):
        raise ValueError(
            f"{size} rank{'s' * (size > 1)} started in a Slurm job of {nodes} nodes and "
            f"{max(tasks, nodes)} tasks: start ranks by `srun python -m launch.train ...`; or set "
            f"{RANKS}={size} if so many are meant"
        )


def rendezvous_port(job_id: int, restart: int) -> int:
    """Return a port that differs from job to job and from one start of a job to the next."""
    return 20000 + (7 * job_id + restart) % 10000


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm list: `rack[0-1]n[07-09,12],login` -> `rack0n07`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def interface_towards(master: str) -> str | None:
    """Return the network interface on the way to the first rank's host; None where none is.

    gloo would take the one that this host's own name stands for, which on many machines is the
    loopback (`127.0.1.1 myhost` in /etc/hosts), where no other host can reach it.
    """
    if master in ("127.0.0.1", "localhost", "::1"):
        return None
    addresses = {
        address.address: name
        for name, found in psutil.net_if_addrs().items()
        for address in found
        if address.family == socket.AF_INET
    }
    for target in (master, "192.0.2.1"):  # the second stands for any: the default route
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((target, 9))  # sends nothing; asks for the route
            except OSError:
                continue
            own = probe.getsockname()[0]
        if own in addresses and not own.startswith("127."):
            return addresses[own]
    up = [name for name, state in psutil.net_if_stats().items() if state.isup]
    others = [n for a, n in addresses.items() if not a.startswith("127.") and n in up]
    return others[0] if others else None


def _from_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    size = number_in(environ, "SLURM_STEP_NUM_TASKS", number_in(environ, "SLURM_NTASKS", 1))
    if size == 1:
        return {}
    local_size = _tasks_here(environ)
    job, restart = (number_in(environ, f"SLURM_{k}", 0) for k in ("JOB_ID", "RESTART_COUNT"))
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise ValueError("Slurm's step names no nodes (SLURM_STEP_NODELIST); set MASTER_ADDR")
    # with --gpus-per-task each rank sees one GPU only, whose number is 0
    alone = len(environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")) == 1 < local_size
    defaults = {
        "MASTER_ADDR": first_host(nodes) if local_size < size else "127.0.0.1",
        "MASTER_PORT": str(rendezvous_port(job, restart)),
    }
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0" if alone else environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(local_size),
        **{name: environ.get(name, value) for name, value in defaults.items()},
    }


def _tasks_here(environ: Mapping[str, str]) -> int:
    """Return the step's tasks on this node, from a list like `2(x3),1`."""
    counts: list[int] = []
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    for item in tasks.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise ValueError(
                f"the environment has SLURM_STEP_TASKS_PER_NODE={tasks!r}, not `2(x3)`"
            )
        counts += [int(match[1])] * int(match[2] or "1")
    node = number_in(environ, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else counts[-1]


def _from_open_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    size = number_in(environ, "OMPI_COMM_WORLD_SIZE")
    local_size = number_in(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    if size == 1:
        return {}
    if "MASTER_ADDR" not in environ and local_size < size:
        raise ValueError(
            "mpirun does not say where the first rank is: name its host by "
            "`mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ...`"
        )
    return {
        "RANK": environ["OMPI_COMM_WORLD_RANK"],
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": environ.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": environ.get("MASTER_PORT", "29500"),
    }


def _num_hosts(environ: Mapping[str, str]) -> int:
    """Return about how many hosts the ranks stand on."""
    size = number_in(environ, "WORLD_SIZE", 1)
    local = number_in(environ, "LOCAL_WORLD_SIZE", number_in(environ, "LOCAL_SIZE", 1))
    return -(-size // max(1, local))
