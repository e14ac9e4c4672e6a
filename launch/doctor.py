"""`roformer doctor`: would this run start on these hosts?

Every host of the hostfile, of the Slurm allocation that we are in, or this one alone looks around
(`launch.probe`); what differs or stands in the way is said in one table.
"""

import argparse
import json
import os
import shlex
import socket
import subprocess
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from configs.loader import ConfigError, load
from configs.schema import Config
from launch.errors import EXIT_BAD_INPUT, EXIT_OK
from launch.hostfile import read_hostfile
from launch.preflight import local_processes
from launch.probe import ALONE, REDUCED_MIB
from launch.run_folder import folder_of, unwritable
from launch.scripts import Call, python_words, quote
from trainer.distributed import free_port

PATIENCE_S = 120
"""Longest wait for a host's answers."""
CLOCK_S = 5.0
"""Clocks that differ by more are worth a word."""
COLUMNS = 6
"""Hosts side by side."""


@dataclass
class Answer:
    """What came back from one host."""

    host: str
    facts: dict[str, Any] = field(default_factory=dict)
    reduced: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None


def doctor(arguments: argparse.Namespace, console: Console) -> int:
    """Ask all hosts, print the table, and return 2 where the run would fail."""
    config = load(arguments.config, arguments.overrides)
    call = Call(arguments.config, tuple(arguments.overrides), Path.cwd())
    hosts = find_hosts(config, arguments.hostfile)
    answers = ask(config, call, hosts)
    for first in range(0, len(answers), COLUMNS):
        console.print(table_of(answers[first : first + COLUMNS]))
    warnings, problems = judge(answers)
    for warning in warnings:
        console.print(f"note: {warning}", style="yellow", markup=False)
    for problem in problems:
        console.print(f"would fail: {problem}", style="red", markup=False)
    if not problems:
        console.print("the run would start")
    return EXIT_BAD_INPUT if problems else EXIT_OK


@dataclass(frozen=True)
class Target:
    """A host to ask."""

    name: str
    ranks: int
    prefix: tuple[str, ...]
    """Words that run a shell command there."""


def find_hosts(config: Config, hostfile: str | None) -> list[Target]:
    """Return the hosts of the hostfile, else of the Slurm allocation, else this one."""
    if (name := hostfile or config.launch.hostfile) is not None:
        options = [*shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", "")), "-oBatchMode=yes"]
        ssh = ("ssh", *options, "-oConnectTimeout=10")
        hosts = read_hostfile(Path(name))
        return [Target(host.name, len(host.slots), (*ssh, host.name)) for host in hosts]
    if nodes := os.environ.get("SLURM_JOB_NODELIST"):
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
        )
        srun = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--export=ALL")
        ranks = local_processes(config)
        return [
            Target(node, ranks, (*srun, f"--nodelist={node}", "bash", "-c"))
            for node in listed.stdout.split()
        ]
    return [Target(socket.gethostname(), local_processes(config), ("bash", "-c"))]


def ask(config: Config, call: Call, hosts: Sequence[Target]) -> list[Answer]:
    """Let every host look around, all at the same time."""
    folder = folder_of(config).parent
    if (obstacle := unwritable(folder)) is not None:
        raise ConfigError([f"run.dir: {obstacle} is no folder that can be written to"])
    folder.mkdir(parents=True, exist_ok=True)
    token = folder.absolute() / f".doctor-{uuid.uuid4().hex}"
    token.touch()
    port, ranks = free_port(), sum(host.ranks for host in hosts)
    master = hosts[0].name if len(hosts) > 1 else ALONE
    # a host that is alone reduces with itself, where the run will
    asked = [*hosts, *hosts] if len(hosts) == 1 < ranks else list(hosts)
    launch = config.launch
    before = [
        f"cd {quote(str(call.folder))}",
        *launch.setup,
        *(f"export {name}={quote(value)}" for name, value in launch.environment.items()),
    ]

    def one(number: int, host: Target) -> Answer:
        words = [*call.words, f"--rank={number}", f"--world={len(asked)}", f"--master={master}"]
        words += [f"--port={port}", f"--ranks={ranks}", f"--slots={host.ranks}", f"--token={token}"]
        probe = f"{python_words(launch, call)} -m launch.probe {' '.join(map(quote, words))}"
        return _listen(host, " && ".join([*before, f"exec {probe}"]))

    try:
        with ThreadPoolExecutor(len(asked)) as pool:
            return list(pool.map(one, range(len(asked)), asked))[: len(hosts)]
    finally:
        token.unlink()


def _listen(host: Target, command: str) -> Answer:
    """Run a probe on a host and read its lines."""
    try:
        done = subprocess.run(
            [*host.prefix, command], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Answer(host.name, failure=f"no answer within {PATIENCE_S} s")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return Answer(host.name, failure=said[-1])
    return Answer(host.name, lines[0], lines[1] if len(lines) > 1 else {})


def judge(answers: Sequence[Answer]) -> tuple[list[str], list[str]]:
    """Return what is worth a word, and what would stop the run."""
    warnings: list[str] = []
    problems: list[str] = []
    first = next((answer for answer in answers if answer.facts), None)
    for answer in answers:
        if answer.failure is not None:
            problems.append(f"{answer.host}: {answer.failure}")
            continue
        assert first is not None
        problems += (f"{answer.host}: {problem}" for problem in answer.facts["problems"])
        for name, version in answer.facts["versions"].items():
            expected = first.facts["versions"].get(name)
            if version != expected:
                problems.append(
                    f"{answer.host}: {name} is {version}, and {expected} on {first.host}"
                )
        if answer.facts["gpus"] != first.facts["gpus"]:
            warnings.append(
                f"{answer.host}: other GPUs than {first.host}; the slowest sets the pace"
            )
        if "failed" in answer.reduced:
            problems.append(f"{answer.host}: no all-reduce: {answer.reduced['failed']}")
        elif "time" in answer.reduced and "time" in first.reduced:
            ahead = answer.reduced["time"] - first.reduced["time"]
            if abs(ahead) > CLOCK_S:
                warnings.append(
                    f"{answer.host}: its clock differs from {first.host}'s by {ahead:.0f} s"
                )
        warnings += (
            f"{answer.host}: {lock} makes every build of that op wait for ever; remove it, if no "
            "build runs (training needs none by default)"
            for lock in answer.facts["locks"]
        )
    return warnings, list(dict.fromkeys(problems))


def table_of(answers: Sequence[Answer]) -> Table:
    """Show what hosts have, side by side."""
    table = Table(header_style="bold")
    table.add_column("")
    for answer in answers:
        table.add_column(answer.host)
    rows = {
        "python": lambda a: a.facts["versions"]["python"],
        "torch": lambda a: a.facts["versions"]["torch"],
        "deepspeed": lambda a: a.facts["versions"]["deepspeed"],
        "code": lambda a: a.facts["versions"]["git"] or "no git",
        "machine": lambda a: a.facts["machine"],
        "GPUs": lambda a: f"{len(a.facts['gpus'])} {' '.join(a.facts['gpus'][:1])}".strip(),
        "free memory": lambda a: _gib(a.facts["memory"]),
        "free disk": lambda a: _gib(a.facts["disk"]) if "disk" in a.facts else "?",
        "free /dev/shm": lambda a: _gib(a.facts["shm"]),
        "interface": lambda a: a.facts["interface"] or "-",
        "JIT locks": lambda a: str(len(a.facts["locks"])),
        "run folder": lambda a: (
            "no" if any("folder" in p for p in a.facts["problems"]) else "writes"
        ),
        f"all-reduce, {REDUCED_MIB} MiB": _reduced,
        "clock ahead": lambda a: _ahead(a, answers[0]),
        "problems": lambda a: str(len(a.facts["problems"])),
    }
    for title, cell in rows.items():
        cells = ["no answer" if answer.failure else cell(answer) for answer in answers]
        table.add_row(title, *cells)
    return table


def _reduced(answer: Answer) -> str:
    if "seconds" not in answer.reduced:
        return "failed" if answer.reduced else "-"
    return f"{answer.reduced['seconds'] * 1000:.1f} ms"


def _ahead(answer: Answer, first: Answer) -> str:
    if "time" not in answer.reduced or "time" not in first.reduced:
        return "-"
    return f"{answer.reduced['time'] - first.reduced['time']:+.2f} s"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
