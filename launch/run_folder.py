"""A run's folder: what it is made from, and the markers by which a script reads how it ended.

config.yaml      resolved; versions and fingerprints stand in its head, and in versions.json
metrics.jsonl    the curves
checkpoints/     see trainer.checkpoint
done             the run is finished           } left at the end, taken away at the start
requeue          it was preempted, and saved   }
stop             whoever makes it asks the run to save and end; taken away when it has
lock             held by the first rank while it trains
"""

import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import torch

from configs.loader import ConfigError, load, to_yaml
from configs.schema import Config

DONE, REQUEUE, STOP, STUDY, LOCK = "done", "requeue", "stop", "study.json", "lock"
PARENT = "ROFORMER_PARENT"
"""Variable by which ranks know the `roformer` process that started them."""

PACKAGES = ("roformer-pretraining", "torch", "deepspeed", "webdataset", "sentencepiece", "mlflow")

CURVE_SECTIONS = ("tokenizer", "model", "objective", "curriculum", "optimizer", "schedule")
"""Sections that shape the curve: another value of theirs is another run."""
CURVE_KEYS = ("run.seed", "data.train", "data.eval", "data.lanes", "data.text_key")


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
            lock_folder(folder).close()
        except ValueError as error:
            yield str(error)
            return
    written = folder / "config.yaml"
    if not written.exists():
        return
    try:
        before = load(written)
    except ConfigError as error:
        yield f"{error.problems[0]}; choose another run.name"
        return
    if changed := list(_differences(before, config)):
        yield (
            f"run.name: {folder} is a run with another configuration ({'; '.join(changed)}); "
            f"choose another run.name, or remove that folder"
        )


def unwritable(path: Path) -> Path | None:
    """Return what stands in the way of a folder at `path`: a file, or a folder closed to us."""
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    can_write = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return None if can_write else existing


def lock_folder(folder: Path) -> TextIO:
    """Take a run's folder for this process alone, until the file returned is closed.

    Raises:
        ValueError: If another process has it.
    """
    lock = (folder / LOCK).open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ValueError(
            f"{folder} is being trained by another process; wait for its end, or make the file "
            f"{folder / STOP} to ask it to save and end"
        ) from None
    return lock


def data_problems(config: Config, fingerprints: Mapping[str, Any]) -> Iterator[str]:
    """Say what of the data that a run has begun with is other data now."""
    written = folder_of(config) / "versions.json"
    if written.exists():
        before = json.loads(written.read_text(encoding="utf-8"))
        for key, value in fingerprints.items():
            if before.get(key) != value:
                yield (
                    f"{folder_of(config)} was trained with another {key} ({before.get(key)}; now "
                    f"{value}); choose another run.name, or remove that folder"
                )


def _differences(before: Config, now: Config) -> Iterator[str]:
    old, new = (_curve_leaves(config) for config in (before, now))
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            yield f"{key}: {old.get(key)} before, {new.get(key)} now"


def _curve_leaves(config: Config) -> dict[str, Any]:
    leaves = dict(_flatten("", config.model_dump(mode="json")))
    return {
        key: value
        for key, value in leaves.items()
        if key.partition(".")[0] in CURVE_SECTIONS
        or f"{key}.".startswith(tuple(f"{curve_key}." for curve_key in CURVE_KEYS))
    }


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
