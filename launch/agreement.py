"""All ranks of a run must mean the same run; they say so to each other before it starts.

A rank that reads another config, other code, data or tokenizer would train its share of another
run: at best a hang, at worst a curve of neither. What a rank cannot read itself is told to all as
well, so that none waits for it in vain.
"""

import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from configs.loader import ConfigError, load
from configs.schema import Config
from launch.errors import EXIT_BAD_INPUT, Told, one_line
from launch.preflight import Prepared, fingerprints, prepare
from launch.run_folder import versions
from trainer.distributed import World, barrier, gather_from_ranks
from trainer.tracking import flatten

MAX_LINES = 20


START_TIMEOUT_S = 600
"""Longest wait for the other ranks of one that could not read its config."""


@dataclass
class Attempt:
    """What one rank found when it read the config and what that names."""

    config: Config | None = None
    prepared: Prepared | None = None
    problems: tuple[str, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def timeout_s(self) -> int:
        """Longest wait for the other ranks."""
        return self.config.engine.timeout_s if self.config else START_TIMEOUT_S


def attempt(path: Path, overrides: Sequence[str], world: World) -> Attempt:
    """Read a config and what it names as one of the ranks; keep what is wrong with it."""
    mine = Attempt()
    try:
        mine.config = load(path, overrides)
        mine.facts = flatten(mine.config.model_dump(mode="json"))
        mine.prepared = prepare(mine.config, world.size)
    except ConfigError as error:
        mine.problems = error.problems
    except (ValueError, OSError) as error:
        mine.problems = (one_line(error),)
    if mine.prepared is not None:
        mine.facts |= _facts(mine.prepared)
    return mine


def agree(mine: Attempt, world: World) -> Prepared:
    """Compare all ranks with the first one; return what this one has prepared.

    Every rank must call it.

    Raises:
        Told: On all ranks, where any has a problem or differs; the first has said which.
    """
    everyone = [(socket.gethostname(), mine.problems, mine.facts)]
    if world.size > 1:
        everyone = gather_from_ranks(everyone[0])
    lines = differences(everyone)
    if lines:
        if world.is_first:
            for line in lines:
                print(f"roformer: error: {line}", file=sys.stderr, flush=True)
        barrier()  # a launcher ends the others as soon as one has ended
        raise Told(EXIT_BAD_INPUT)
    assert mine.prepared is not None
    return replace(mine.prepared, hosts=tuple(dict.fromkeys(host for host, _, _ in everyone)))


def differences(everyone: Sequence[tuple[str, Sequence[str], Mapping[str, str]]]) -> list[str]:
    """Say what ranks found wrong, and else in what they differ from the first one.

    Args:
        everyone: Host, problems and facts of each rank.
    """
    problems: dict[str, list[int]] = {}
    for rank, (_, found, _) in enumerate(everyone):
        for problem in found:
            problems.setdefault(problem, []).append(rank)
    hosts = [host for host, _, _ in everyone]
    lines = [
        problem if len(ranks) == len(everyone) else f"{_ranks(ranks, hosts)}: {problem}"
        for problem, ranks in problems.items()
    ]
    if lines:
        return _shortened(lines)
    first = everyone[0][2]
    found_differences: dict[tuple[str, str], list[int]] = {}
    for rank, (_, _, facts) in enumerate(everyone):
        for key in sorted(first.keys() | facts.keys()):
            if facts.get(key) != first.get(key):
                found_differences.setdefault((key, facts.get(key, "absent")), []).append(rank)
    return _shortened(
        [
            f"{_ranks(ranks, hosts)}: {key} is {value}, and {first.get(key, 'absent')} on "
            f"{_ranks([0], hosts)}: all ranks need the same config, code and data"
            for (key, value), ranks in found_differences.items()
        ]
    )


def _facts(prepared: Prepared) -> dict[str, str]:
    known: dict[str, Any] = {
        "versions": {k: v for k, v in versions().items() if k != "device"},
        "hashes": fingerprints(prepared.tokenizer, prepared.train, prepared.eval),
        "checkpoint": prepared.checkpoint.name if prepared.checkpoint else "none",
    }
    return flatten(known)


def _ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Name ranks and their hosts: `ranks 2, 3 (n2)`."""
    numbers = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" * (len(ranks) > 4))
    where = list(dict.fromkeys(hosts[rank] for rank in ranks))
    more = f" and {len(where) - 3} more" if len(where) > 3 else ""
    return f"rank{'s' * (len(ranks) > 1)} {numbers} ({', '.join(where[:3])}{more})"


def _shortened(lines: list[str]) -> list[str]:
    left_out = len(lines) - MAX_LINES
    return [*lines[:MAX_LINES], f"and {left_out} more differences"] if left_out > 0 else lines
