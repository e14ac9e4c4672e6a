"""DeepSpeed's list of machines: `host slots=8`, one a line, and the filters over it.

DeepSpeed reads it leniently: a missing file is a run on this machine alone, and what follows the
slots is passed over. Here every line that is not what it seems is refused, with its number.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from configs.loader import ConfigError

MOST_SLOTS = 1024
"""More are a slip of the keyboard."""
_LINE = re.compile(r"(?P<host>[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)[ \t]+slots=(?P<slots>\d+)")


@dataclass(frozen=True)
class Host:
    """A machine, and which of its devices take a rank."""

    name: str
    slots: tuple[int, ...]


def read_hostfile(path: Path, *, include: str = "", exclude: str = "") -> tuple[Host, ...]:
    """Read a hostfile and apply a filter in DeepSpeed's words: `n1@n2:0,2`.

    Raises:
        ConfigError: With every bad line, or what is wrong with the filter.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError([f"hostfile {path}: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"hostfile {path}: is no UTF-8 text"]) from None
    hosts: dict[str, Host] = {}
    first_line: dict[str, int] = {}
    problems: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        where = f"hostfile {path}:{number}"
        if line.endswith("\r"):
            problems.append(f"{where}: ends as in Windows (CRLF); save it with Unix line ends")
            line = line.rstrip("\r")
        entry = line.partition("#")[0].strip(" \t")
        if not entry:
            continue
        match = _LINE.fullmatch(entry)
        if match is None or not 0 < int(match["slots"]) <= MOST_SLOTS:
            problems.append(f"{where}: {entry!r}: {_fault(entry)}")
            continue
        name = match["host"]
        first = first_line.setdefault(name.lower(), number)  # N1 is n1
        if first != number:
            problems.append(f"{where}: {name} stands in line {first} already")
        else:
            hosts[name] = Host(name, tuple(range(int(match["slots"]))))
    if not hosts and not problems:
        problems.append(f"hostfile {path}: names no host; write lines like `node1 slots=8`")
    if problems:
        raise ConfigError(problems)
    return _filtered(hosts, include, exclude)


def _fault(entry: str) -> str:
    """Say what is wrong with a line that names no host and slots."""
    host, *rest = entry.split()
    if "@" in host:
        user, _, name = host.partition("@")
        return f"a user has no place here; set `User {user}` for {name} in ~/.ssh/config"
    if not re.fullmatch(r"[A-Za-z0-9._-]+", host):
        return f"{host!r} is no host name or address"
    if not rest:
        return f"no slots; write `{host} slots=8`"
    if re.match(r"slots(\s+=|=\s)", " ".join(rest)) or rest == ["slots="]:
        return "blanks around the `=`; write `slots=8`"
    slots = rest[0].removeprefix("slots=")
    if slots == rest[0]:
        return f"{rest[0]!r} is not `slots=8`"
    if not slots.isdecimal():
        return f"{slots!r} is no number of slots"
    if int(slots) == 0:
        return "slots=0 gives it no rank; remove the line"
    if int(slots) > MOST_SLOTS:
        return f"no machine has more than {MOST_SLOTS} slots"
    return f"{' '.join(rest[1:])!r} behind the slots would be passed over; remove it"


def _filtered(hosts: dict[str, Host], include: str, exclude: str) -> tuple[Host, ...]:
    if include and exclude:
        raise ConfigError(["--include and --exclude shut each other out; give one of them"])
    option, text = ("--include", include) if include else ("--exclude", exclude)
    if not text:
        return tuple(hosts.values())
    chosen: dict[str, set[int]] = {}
    problems: list[str] = []
    for name, slots in _nodes(option, text, problems):
        if name not in hosts:
            problems.append(f"{option} {text}: {name!r} is not in the hostfile")
            continue
        has = set(hosts[name].slots)
        if strange := sorted(set(slots) - has):
            problems.append(
                f"{option} {text}: {name} has {len(has)} slots (0 to {len(has) - 1}), and no "
                + ", ".join(map(str, strange))
            )
        chosen.setdefault(name, set()).update(slots or has)
    kept = []
    for host in hosts.values():
        taken = chosen.get(host.name, set())
        left = [n for n in host.slots if (n in taken) == bool(include)]
        if left:
            kept.append(Host(host.name, tuple(left)))
    if not kept and not problems:
        problems.append(f"{option} {text}: leaves no slot")
    if problems:
        raise ConfigError(problems)
    return tuple(kept)


def _nodes(option: str, text: str, problems: list[str]) -> Iterator[tuple[str, list[int]]]:
    """Yield each node of a filter with its slots; none named: all of them."""
    for node in text.split("@"):
        name, colon, slots = node.partition(":")
        numbers = slots.split(",") if colon else []
        if not name or not all(number.isdecimal() for number in numbers):
            problems.append(f"{option} {text}: {node!r} is not `host` or `host:0,2`")
        else:
            yield name, [int(number) for number in numbers]
