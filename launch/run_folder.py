"""A run's folder: what it is made from, and the markers by which a script reads how it ended.

config.yaml      resolved; versions and fingerprints stand in its head, and in versions.json
metrics.jsonl    the curves
checkpoints/     see trainer.checkpoint
done             the run is finished           } left at the end, taken away at the start
requeue          it was preempted, and saved   }
stop             whoever makes it asks the run to save and end; taken away when it has
lock             held by the first rank while it trains
ranks/           see trainer.liveness
bad_steps.jsonl  steps that were skipped, with their documents
"""

import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from typing import Any, TextIO

import torch

from configs.loader import ConfigError, load, to_yaml
from configs.schema import Config
from trainer import checkpoint

DONE, REQUEUE, STOP, STUDY, LOCK = "done", "requeue", "stop", "study.json", "lock"
PULSES, CHECKPOINTS = "ranks", "checkpoints"
PARENT, STARTED = "ROFORMER_PARENT", "ROFORMER_STARTED"
"""Variables by which ranks know the `roformer` process that started them, and when (unix s)."""

PACKAGES = ("roformer-pretraining", "torch", "deepspeed", "webdataset", "sentencepiece", "mlflow")

CURVE_SECTIONS = ("tokenizer", "model", "objective", "curriculum", "optimizer", "schedule")
"""Sections that shape the curve: another value of theirs is another run."""
CURVE_KEYS = ("run.seed", "data.lanes", "data.packing", "data.text_key")
"""So do these, and the data, which is known by its sha256 wherever it lies."""


def folder_of(config: Config) -> Path:
    """Return the run's folder."""
    return Path(config.run.dir) / config.run.name


def is_done(config: Config) -> bool:
    """Whether this very run is finished."""
    return (folder_of(config) / DONE).exists()


def folder_problems(config: Config) -> Iterator[str]:
    """Say why a run of this config cannot live in its folder, if it cannot."""
    folder = folder_of(config)
    if (folder / STUDY).exists():
        yield f"{folder} is a study of `roformer compare`; choose another run.name"
        return
    if (obstacle := unwritable(folder)) is not None:
        yield f"run.dir: {obstacle} is no folder that can be written to; choose another run.dir"
        return
    if (folder / LOCK).exists():
        try:
            lock_folder(folder, shared=True).close()
        except ValueError as error:
            yield str(error)
            return
    if not (folder / "config.yaml").exists():
        return
    try:
        refused = [c for c in _config_changes(config) if not c.is_taken]
    except ConfigError as error:
        yield f"{error.problems[0]}; choose another run.name"
        return
    if refused:
        yield (
            f"run.name: {folder} is a run with another configuration "
            f"({'; '.join(map(str, refused))}); choose another run.name, or go on regardless by "
            f"checkpoint.allow_changes=[{','.join(change.key for change in refused)}]"
        )


@dataclass(frozen=True)
class Change:
    """A key that differs from a run's last start."""

    key: str
    before: Any
    now: Any
    is_taken: bool
    """Whether it leaves the curve so far alone, or is allowed by `checkpoint.allow_changes`."""

    def __str__(self) -> str:
        return f"{self.key}: {self.before} before, {self.now} now"


def changes(config: Config, fingerprints: Mapping[str, Any]) -> list[Change]:
    """Return what differs from the last start in this run's folder; nothing before the first.

    Raises:
        ConfigError: If its config.yaml can't be read.
    """
    return [*_config_changes(config), *_data_changes(config, fingerprints)]


def _config_changes(config: Config) -> Iterator[Change]:
    written = folder_of(config) / "config.yaml"
    if not written.exists():
        return
    before = load(written)
    old, new = (dict(_flatten("", c.model_dump(mode="json"))) for c in (before, config))
    keeps_past = _keeps_past(before, config)
    for key in sorted(old.keys() | new.keys()):
        if key.startswith("checkpoint.allow_changes") or old.get(key) == new.get(key):
            continue
        yield Change(key, old.get(key), new.get(key), _is_taken(key, old, new, keeps_past, config))


def _is_taken(
    key: str, old: Mapping[str, Any], new: Mapping[str, Any], keeps_past: bool, config: Config
) -> bool:
    """Whether a key may differ: it shapes no curve, or only what is to come, or is allowed to."""
    is_stage_to_come = key.startswith("curriculum.stages.") and (
        key.endswith(".steps") or key not in old or key not in new
    )
    shapes_curve = key.partition(".")[0] in CURVE_SECTIONS or key.startswith(CURVE_KEYS)
    if not shapes_curve or (is_stage_to_come and keeps_past):
        return True
    return any(f"{key}.".startswith(f"{name}.") for name in config.checkpoint.allow_changes)


def _keeps_past(before: Config, now: Config) -> bool:
    """Whether the steps that a run has made lie in the same stages in both."""
    saved = checkpoint.complete(folder_of(now) / CHECKPOINTS)
    step = checkpoint.step_of(saved[0]) if saved else 0
    ends = (accumulate(s.steps for s in c.curriculum.stages) for c in (before, now))
    old, new = ([end for end in found if end < step] for found in ends)
    return old == new


def _data_changes(config: Config, fingerprints: Mapping[str, Any]) -> Iterator[Change]:
    written = folder_of(config) / "versions.json"
    if not written.exists():
        return
    before = json.loads(written.read_text(encoding="utf-8"))
    for key, value in fingerprints.items():
        if before.get(key) != value:
            named = [name.partition(".")[0] for name in config.checkpoint.allow_changes]
            yield Change(f"sha256 of {key}", before.get(key), value, key in named)


def unwritable(path: Path) -> Path | None:
    """Return what stands in the way of a folder at `path`: a file, or a folder closed to us."""
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    can_write = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return None if can_write else existing


def lock_folder(folder: Path, *, shared: bool = False) -> TextIO:
    """Take a run's folder for this process alone, until the file returned is closed.

    Or, `shared`, with others that only ask whether it is free, as all ranks of a start do at once.

    Raises:
        ValueError: If another process has it.
    """
    lock = (folder / LOCK).open("a+")  # NFS shares what can be read, and takes what can be written
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ValueError(
            f"{folder} is being trained by another process; wait for its end, or make the file "
            f"{folder / STOP} to ask it to save and end"
        ) from None
    return lock


def data_problems(config: Config, fingerprints: Mapping[str, Any]) -> Iterator[str]:
    """Say what of the data that a run has begun with is other data now."""
    for change in _data_changes(config, fingerprints):
        if not change.is_taken:
            key = change.key.rpartition(" ")[2]
            yield (
                f"{folder_of(config)} was trained with another {key} ({change.before}; now "
                f"{change.now}); choose another run.name, or go on regardless by "
                f"checkpoint.allow_changes=[{key}]"
            )


def _flatten(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, below in items:
            yield from _flatten(f"{prefix}.{key}" if prefix else str(key), below)
    else:
        yield prefix, value


def open_folder(config: Config, fingerprints: Mapping[str, Any]) -> Path:
    """Make the folder of a run that starts or goes on; take the last end's markers away."""
    folder = folder_of(config)
    folder.mkdir(parents=True, exist_ok=True)
    for marker in (DONE, REQUEUE):
        (folder / marker).unlink(missing_ok=True)
    facts = {**versions(), **fingerprints}
    head = "".join(f"# {key}: {json.dumps(value)}\n" for key, value in facts.items())
    write_text(folder / "config.yaml", head + to_yaml(config))
    write_text(folder / "versions.json", json.dumps(facts, indent=1))
    return folder


def write_text(file: Path, text: str) -> None:
    """Write a file that is whole or unchanged."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)


def versions() -> dict[str, Any]:
    """Return what this process runs on: packages, git revision, machine."""
    found: dict[str, Any] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["git"] = _git_revision()
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    else:
        found["device"] = f"cpu: {_cpu_name()} x {len(os.sched_getaffinity(0))}"
    return found


def _git_revision() -> str | None:
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
