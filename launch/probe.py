"""What one host says of itself to `roformer doctor`.

    python -m launch.probe CONFIG [key=value ...] --rank 1 --world 2 --master n1 --port 29500

It prints a line of JSON with what it finds, and, where there are several hosts, another with the
time of an all-reduce among them.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from configs.loader import ConfigError, load
from configs.schema import Config
from launch.environment import interface_towards
from launch.plan import make_plan
from launch.preflight import Prepared, prepare
from launch.run_folder import folder_of, unwritable, versions
from trainer.distributed import sum_over_ranks

ALONE = "127.0.0.1"
"""Rendezvous of a host that is alone."""
REDUCED_MIB = 16
WAIT_S = 30


def main(argv: Sequence[str] | None = None) -> int:
    """Look around, then reduce with the other hosts."""
    parser = argparse.ArgumentParser(prog="launch.probe", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    for name in ("--rank", "--world", "--port", "--ranks", "--slots"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--master", required=True)
    parser.add_argument("--token", required=True, help="a file that the asking host has just made")
    arguments = parser.parse_intermixed_args(argv)
    facts = look_around(arguments)
    print(json.dumps(facts), flush=True)
    if arguments.world > 1:
        print(json.dumps(reduce(arguments)), flush=True)
    return 0


def look_around(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what this host has, and what on it would stop the run."""
    found: dict[str, Any] = {"host": socket.gethostname(), "problems": []}
    found["versions"] = {k: v for k, v in versions().items() if k != "device"}
    found["machine"] = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    found["gpus"] = [
        torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())
    ]
    if found["gpus"] and len(found["gpus"]) < arguments.slots:
        found["problems"].append(f"{arguments.slots} ranks are meant for {len(found['gpus'])} GPUs")
    found["memory"] = psutil.virtual_memory().available
    found["shm"] = shutil.disk_usage("/dev/shm").free
    found["interface"] = interface_towards(arguments.master)
    if arguments.master != ALONE and found["interface"] is None:
        found["problems"].append(
            "no network interface but the loopback: no other host can reach it"
        )
    if arguments.rank == 0:
        found["problems"] += port_problems(arguments.port)
    found["locks"] = [str(path) for path in stale_locks()]
    if not Path(arguments.token).exists():
        found["problems"].append(f"{Path(arguments.token).parent} is no folder that hosts share")
    try:
        config = load(arguments.config, arguments.overrides)
        found["problems"] += run_problems(config, arguments.ranks, arguments.slots, found)
    except ConfigError as error:
        found["problems"] += error.problems
    return found


def run_problems(config: Config, ranks: int, slots: int, found: dict[str, Any]) -> list[str]:
    """Say what on this host would stop the run; add the disk's space to what was found."""
    problems: list[str] = []
    folder = folder_of(config)
    if (obstacle := unwritable(folder)) is not None:
        problems.append(f"run.dir: {obstacle} is no folder that can be written to")
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    found["disk"] = shutil.disk_usage(existing).free
    if config.data.workers and found["shm"] < 2**26:
        problems.append(
            f"/dev/shm has {found['shm'] / 2**20:.0f} MiB free, and data.workers="
            f"{config.data.workers} pass batches through it; set data.workers=0 or enlarge it"
        )
    try:
        prepared = prepare(config, ranks)
    except ConfigError as error:
        return [*problems, *error.problems]
    return [*problems, *room_problems(prepared, ranks, slots, found)]


def room_problems(
    prepared: Prepared, ranks: int, slots: int, found: Mapping[str, Any]
) -> Iterator[str]:
    """Say where memory or disk would not suffice, by what `roformer plan` counts."""
    kind = "gpu" if found["gpus"] else "cpu"
    vocab_size = prepared.tokenizer.vocab_size
    plan = make_plan(prepared.config, world=ranks, vocab_size=vocab_size, kind=kind)
    needed, free = plan.fullest.memory.device, found["memory"] / slots
    if kind == "gpu":
        free = torch.cuda.get_device_properties(0).total_memory
    if needed > free:
        yield (
            f"memory: a rank takes {needed / 2**30:.1f} GiB in stage {plan.fullest.stage.name}, "
            f"and {free / 2**30:.1f} are free for it; `roformer plan` names a change that fits"
        )
    kept = plan.checkpoint_bytes * (prepared.config.checkpoint.keep + 1)
    if kept > found["disk"]:
        yield (
            f"disk: {prepared.config.checkpoint.keep} checkpoints and one being written take "
            f"{kept / 2**30:.1f} GiB, and {found['disk'] / 2**30:.1f} are free"
        )


def port_problems(port: int) -> list[str]:
    """Say whether the rendezvous can listen."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return [f"port {port}: {error.strerror}; another run may be on this host"]
    return []


def stale_locks() -> list[Path]:
    """Return the locks in torch's folder of compiled extensions, for whose end builds wait."""
    home = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions").expanduser()
    return sorted(home.glob("**/lock")) if home.is_dir() else []


def reduce(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time an all-reduce among all hosts; return what hindered it where it fails."""
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = interface_towards(arguments.master)
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    on_gpu = torch.cuda.is_available()
    try:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"tcp://{arguments.master}:{arguments.port}",
            rank=arguments.rank,
            world_size=arguments.world,
            timeout=datetime.timedelta(seconds=WAIT_S),
        )
        data = torch.ones(REDUCED_MIB * 2**18, device="cuda" if on_gpu else "cpu")
        times = []
        for _ in range(4):
            sum_over_ranks([0.0], data.device)  # all begin together
            now, start = time.time(), time.perf_counter()
            dist.all_reduce(data)
            float(data[0])  # waits for a GPU
            times.append(time.perf_counter() - start)
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        return {"failed": " ".join(str(error).split())[:160]}
    return {"seconds": min(times), "time": now}


if __name__ == "__main__":
    sys.exit(main())
