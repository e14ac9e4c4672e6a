"""`roformer launch`: a run on the machines of a hostfile or of Slurm.

Prints the script that would run; with --submit, keeps it in the run's folder and starts it.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from configs.loader import ConfigError, load
from configs.schema import Config
from launch.errors import EXIT_OK, Failed
from launch.hostfile import Host, read_hostfile
from launch.preflight import prepare
from launch.rank_log import LOGS
from launch.run_folder import folder_of, is_done, write_text
from launch.scripts import (
    Call,
    Element,
    hostfile_script,
    merge_command,
    num_ranks,
    shards_script,
    slurm_script,
)
from trainer.tracking import start_parent

SCRIPT, SHARDS_SCRIPT = "launch.sh", "shards.sh"
REACH_S = 10
"""Longest wait for a host's answer."""


def launch(arguments: argparse.Namespace, console: Console) -> int:
    """Print the script of a run on other machines, or start it."""
    config = load(arguments.config, arguments.overrides)
    call = Call(arguments.config, tuple(arguments.overrides), Path.cwd())
    if arguments.slurm:
        return _on_slurm(config, call, arguments, console)
    hostfile = arguments.hostfile or config.launch.hostfile
    if hostfile is None:
        raise ConfigError(["launch: give --slurm, or --hostfile FILE (or set launch.hostfile)"])
    if arguments.array or arguments.shards:
        raise ConfigError(["launch: an array needs --slurm"])
    return _on_hosts(config, call, Path(hostfile), arguments, console)


def _on_slurm(config: Config, call: Call, arguments: argparse.Namespace, console: Console) -> int:
    folder = folder_of(config)
    if arguments.shards:
        script = shards_script(config, call, arguments.shards)
        job = _print_or_submit(script, folder / SHARDS_SCRIPT, arguments.submit, console)
        if job is not None:
            place = str(folder / SHARDS_SCRIPT)
            again = _sbatch(["sbatch", "--parsable", f"--dependency=afterok:{job}", place])
            merge = _sbatch(merge_command(config, call, again))
            console.print(f"then       {again}, which writes the shards; {merge}, which joins them")
        return EXIT_OK
    if problems := list(_slurm_problems(config)):
        raise ConfigError(problems)
    if not arguments.array:
        if arguments.submit and is_done(config):
            console.print(f"{folder} is finished; remove it to train again")
            return EXIT_OK
        prepare(config, num_ranks(config.launch), here=False)
        _print_or_submit(slurm_script(config, call), folder / SCRIPT, arguments.submit, console)
        return EXIT_OK
    from launch import compare  # brings matplotlib, which one run does not need

    if arguments.array == "seeds":
        arms = {config.model.positions: list[str]()}
        config = config.model_copy(
            update={"compare": config.compare.model_copy(update={"arms": arms})}
        )
    runs = list(compare.plan_runs(config, call.config, call.overrides))
    compare.check(folder, runs, world=num_ranks(config.launch), here=False)
    extra: tuple[str, ...] = ()
    if arguments.submit:
        folder.mkdir(parents=True, exist_ok=True)
        compare.write_study(folder, config, runs)
        if (parent := start_parent(folder, config.tracking.mlflow)) is not None:
            extra = (f"tracking.mlflow.parent_run_id={parent}",)
    common = len(call.overrides)
    elements = [Element(str(folder_of(r.config)), (*r.overrides[common:], *extra)) for r in runs]
    script = slurm_script(config, call, elements)
    if _print_or_submit(script, folder / SCRIPT, arguments.submit, console) is not None:
        then = f"report {folder}" if arguments.array == "seeds" else f"compare {call.config}"
        console.print(f"when all its elements are finished: `roformer {then}` draws the report")
    return EXIT_OK


def _slurm_problems(config: Config) -> Iterator[str]:
    launch = config.launch
    if launch.num_processes == "auto":
        yield (
            "launch.num_processes: auto counts the GPUs of this machine, not of Slurm's nodes; "
            "give the number of ranks a node"
        )
    elif launch.slurm.gpus_per_node and launch.slurm.gpus_per_node < launch.num_processes:
        yield (
            f"launch.slurm.gpus_per_node: {launch.slurm.gpus_per_node} GPUs don't serve "
            f"launch.num_processes={launch.num_processes} ranks a node"
        )


def _print_or_submit(script: str, place: Path, submit: bool, console: Console) -> str | None:
    """Print a script, or keep and submit it and return the number of its job."""
    if not submit:
        sys.stdout.write(script)
        return None
    if shutil.which("sbatch") is None:
        raise ConfigError(["launch: there is no sbatch on this machine; run it on a login node"])
    place.parent.mkdir(parents=True, exist_ok=True)  # Slurm's log goes there too
    write_text(place, script)
    job = _sbatch(["sbatch", "--parsable", str(place)])
    is_array = "#SBATCH --array=" in script
    console.print(f"job        {job}")
    console.print(f"script     {place}")
    console.print(f"log        {place.parent}/slurm-{job}{'_N' if is_array else ''}.log")
    if not is_array:
        console.print(f"ranks      {place.parent}/{LOGS}")
    return job


def _sbatch(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"sbatch refuses: {' '.join(done.stderr.split())}")
    return done.stdout.strip().partition(";")[0]


def _on_hosts(
    config: Config, call: Call, path: Path, arguments: argparse.Namespace, console: Console
) -> int:
    hosts = read_hostfile(path, include=arguments.include, exclude=arguments.exclude)
    filters = (("--include", arguments.include), ("--exclude", arguments.exclude))
    words = [word for option, text in filters if text for word in (option, text)]
    prepare(config, sum(len(host.slots) for host in hosts), here=False)
    script = hostfile_script(config, call, hosts, hostfile=path, words=words)
    if not arguments.submit:
        sys.stdout.write(script)
        return EXIT_OK
    folder = folder_of(config)
    if is_done(config):
        console.print(f"{folder} is finished; remove it to train again")
        return EXIT_OK
    if problems := unreachable(hosts):
        raise ConfigError(problems)
    place = folder / SCRIPT
    place.parent.mkdir(parents=True, exist_ok=True)
    write_text(place, script)
    console.print(f"script     {place}")
    console.print(f"ranks      {folder}/{LOGS}")
    started = subprocess.Popen(["bash", str(place)], start_new_session=True)
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    old = {n: signal.signal(n, lambda number, frame: started.send_signal(number)) for n in signals}
    try:
        return started.wait()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def unreachable(hosts: Sequence[Host]) -> list[str]:
    """Say which hosts do not answer on ssh, and why."""
    if missing := [name for name in ("pdsh", "ssh") if shutil.which(name) is None]:
        return [
            f"launch: {' and '.join(missing)} missing on this machine: install it, or start the "
            "script on every host yourself, with the host's number"
        ]
    with ThreadPoolExecutor(32) as pool:
        answers = pool.map(_reach, (host.name for host in hosts))
    return [answer for answer in answers if answer is not None]


def _reach(host: str) -> str | None:
    options = [*shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", "")), "-oBatchMode=yes"]
    command = ["ssh", *options, f"-oConnectTimeout={REACH_S}", host, "true"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=2 * REACH_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{host}: no answer on ssh within {2 * REACH_S} s"
    reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    return None if done.returncode == 0 else f"{host}: not reached by ssh: {reason}"
