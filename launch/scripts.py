"""The scripts that `roformer launch` writes: whole and readable, for people to keep and change.

Rendered from `launch/templates`; examples of each stand beside them. What is put into a script is
quoted so that bash reads exactly the text that stands in the config.
"""

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from configs.schema import Config, LaunchConfig
from launch.environment import RANKS, rendezvous_port
from launch.hostfile import Host
from launch.run_folder import folder_of

_ESCAPES = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


@dataclass(frozen=True)
class Call:
    """The command line that a script stands for."""

    config: Path
    overrides: tuple[str, ...]
    folder: Path
    """Where it was called, and where the ranks run: relative paths start there."""
    python: str = sys.executable

    @property
    def words(self) -> tuple[str, ...]:
        """What stands behind `roformer COMMAND`."""
        return (str(self.config), *self.overrides)


@dataclass(frozen=True)
class Element:
    """One run of an array."""

    run: str
    """Its folder."""
    overrides: tuple[str, ...]
    """Its own, behind those of the whole array."""


def quote(text: str) -> str:
    """Quote a text for bash; one with control characters or `$` in it as $'...'."""
    if not re.search(r"[\x00-\x1f\x7f$`]", text):
        return f"'{text}'" if "," in text and "'" not in text else shlex.quote(text)
    escaped = (
        _ESCAPES.get(c) or (f"\\x{ord(c):02x}" if ord(c) < 32 or ord(c) == 127 else c) for c in text
    )
    return f"$'{''.join(escaped)}'"


def slurm_script(config: Config, call: Call, elements: Sequence[Element] = ()) -> str:
    """Write the sbatch script of one run, or of an array of them."""
    launch, run = config.launch, str(folder_of(config))
    ranks = num_ranks(launch)
    where = f"{ranks} rank{'s' * (ranks > 1)} on {launch.nodes} node{'s' * (launch.nodes > 1)}"
    return _render(
        "slurm.sh.jinja",
        call,
        launch,
        title=f"{config.run.name}: {f'{len(elements)} runs of ' if elements else ''}{where}",
        options=list(_sbatch_options(config, len(elements))),
        elements=elements,
        run=run,
        log_folder=quote(run),
        overrides=call.overrides,
        nodes=launch.nodes,
        tasks=launch.num_processes,
        ranks=ranks,
        srun_options=[*_cpus(launch), *map(quote, launch.slurm.srun_options)],
        command=f"{python_words(launch, call)} -m launch.train {quote(str(call.config))}",
        max_requeues=launch.slurm.max_requeues,
    )


def merge_command(config: Config, call: Call, after: str) -> list[str]:
    """Return the sbatch command that joins the shards' parts when the job `after` is done."""
    shards = _shards_command(config, call)
    return [
        *("sbatch", "--parsable", f"--dependency=afterok:{after}"),
        f"--job-name={config.run.name}-merge",
        f"--output={folder_of(config)}/slurm-%j.log",
        *_of_the_site(config.launch),
        f"--wrap=cd {quote(str(call.folder))} && {shards} --merge",
    ]


def shards_script(config: Config, call: Call, parts: int) -> str:
    """Write the sbatch script of an array that writes the shards in parts."""
    return _render(
        "shards.sh.jinja",
        call,
        config.launch,
        title=f"{config.run.name}: its shards in {parts} parts",
        options=list(_array_options(config, f"{config.run.name}-shards", parts)),
        parts=parts,
        log_folder=quote(str(folder_of(config))),
        command=_shards_command(config, call),
        merge=" ".join(map(quote, merge_command(config, call, "JOB"))),
    )


def _shards_command(config: Config, call: Call) -> str:
    words = " ".join(map(quote, call.words))
    return f"{python_words(config.launch, call)} -m launch.cli shards {words}"


def hostfile_script(
    config: Config, call: Call, hosts: Sequence[Host], *, hostfile: Path, words: Sequence[str] = ()
) -> str:
    """Write the script that starts a run on the hosts of a hostfile.

    `words` filter the hosts; they are options of the deepspeed launcher.
    """
    ranks = sum(len(host.slots) for host in hosts)
    launcher = f"{python_words(config.launch, call)} -m deepspeed.launcher.runner"
    return _render(
        "hostfile.sh.jinja",
        call,
        config.launch,
        title=f"{config.run.name}: {ranks} rank{'s' * (ranks > 1)} on the "
        f"host{'s' * (len(hosts) > 1)} of {hostfile}",
        hosts=hosts,
        hostfile=str(hostfile),
        filter="".join(f" {quote(word)}" for word in words),
        run=str(folder_of(config)),
        ranks=ranks,
        launcher=launcher,
        port=rendezvous_port(sum(map(ord, str(folder_of(config)))), 0),
        arguments=call.words,
    )


def num_ranks(launch: LaunchConfig) -> int:
    """Return the ranks of a Slurm job."""
    assert launch.num_processes != "auto"
    return launch.nodes * launch.num_processes


def python_words(launch: LaunchConfig, call: Call) -> str:
    """Return the words that start python on a machine, in its container where there is one."""
    return " ".join(map(quote, (*launch.container, launch.python or call.python)))


def _sbatch_options(config: Config, num_elements: int) -> Iterator[str]:
    launch, slurm = config.launch, config.launch.slurm
    log = "slurm-%A_%a.log" if num_elements else "slurm-%j.log"
    yield f"--job-name={config.run.name}"
    yield f"--output={_sbatch_path(folder_of(config))}/{log}"
    yield "--open-mode=append"
    yield f"--nodes={launch.nodes}"
    yield f"--ntasks-per-node={launch.num_processes}"
    if slurm.gpus_per_node:
        yield f"--gpus-per-node={slurm.gpus_per_node}"
    yield from _cpus(launch)
    yield from _of_the_site(launch)
    yield "--requeue"
    yield f"--signal=B:USR1@{slurm.signal_s}"
    if num_elements:
        yield f"--array={_array(num_elements, slurm.array_limit)}"
    yield from slurm.options


def _array_options(config: Config, name: str, parts: int) -> Iterator[str]:
    """Yield the options of an array whose elements are one process each."""
    yield f"--job-name={name}"
    yield f"--output={_sbatch_path(folder_of(config))}/slurm-%A_%a.log"
    yield "--open-mode=append"
    yield "--nodes=1"
    yield "--ntasks=1"
    yield f"--cpus-per-task={max(1, config.corpus.workers)}"
    yield from _of_the_site(config.launch)
    yield "--requeue"
    yield f"--array={_array(parts, config.launch.slurm.array_limit)}"
    yield from config.launch.slurm.options


def _of_the_site(launch: LaunchConfig) -> Iterator[str]:
    for name in ("time", "partition", "account", "qos", "mem"):
        if (value := getattr(launch.slurm, name)) is not None:
            yield f"--{name}={value}"


def _cpus(launch: LaunchConfig) -> Iterator[str]:
    """Slurm 22.05 and later does not hand sbatch's number on to srun."""
    if launch.slurm.cpus_per_task is not None:
        yield f"--cpus-per-task={launch.slurm.cpus_per_task}"


def _array(count: int, limit: int | None) -> str:
    return f"0-{count - 1}" + (f"%{limit}" if limit is not None else "")


def _sbatch_path(path: Path) -> str:
    """Write a path as sbatch reads it: % begins one of its own words, blanks need quotes."""
    text = str(path).replace("%", "%%")
    if not re.search(r"[\s\"'\\#]", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _render(name: str, call: Call, launch: LaunchConfig, **content: object) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = quote
    return environment.get_template(name).render(
        folder=str(call.folder),
        setup=launch.setup,
        environment=launch.environment,
        ranks_variable=RANKS,
        **content,
    )
