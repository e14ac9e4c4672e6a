"""Checkpoints: complete, verified, and the same for any world, ZeRO stage and precision.

    checkpoints/step-00001200/
        parameters-00000-of-00002.safetensors   every second parameter: value, exp_avg, exp_avg_sq
        parameters-00001-of-00002.safetensors   the others
        state.json                              progress, cursors of all lanes, Adam's step count
        MANIFEST.json                           size and sha256 of each file, written last

A folder without a manifest is no checkpoint. Removal takes the manifest first. Every parameter is
stored whole, in fp32, under its name; the ranks that wrote it are of no account when it is read.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.distributed import World, barrier, gather_from_ranks
from trainer.state import TrainState

if TYPE_CHECKING:  # importing deepspeed takes seconds, which a look for checkpoints need not pay
    from trainer.engine import Engine

log = logging.getLogger(__name__)

MANIFEST = "MANIFEST.json"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """What a complete checkpoint holds."""

    folder: Path
    state: TrainState
    optimizer_steps: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    """By parameter name: `value`, and Adam's `exp_avg` and `exp_avg_sq` after the first step."""

    @property
    def weights(self) -> dict[str, Tensor]:
        """The model's state dict."""
        return {name: kinds["value"] for name, kinds in self.tensors.items()}


def save(root: Path, engine: "Engine", state: TrainState, *, world: World, keep: int) -> Path:
    """Write a checkpoint of all ranks and remove all but the newest `keep`.

    Every rank must call it. Raises OSError, naming the file, where the disk refuses.
    """
    folder = root / f"step-{state.step:08d}"
    if world.is_first:
        _remove(folder)  # what a kill left half-written
        folder.mkdir(parents=True)
    barrier()
    mine: dict[str, Tensor] = {}
    for number, (name, tensors) in enumerate(engine.gather_state()):
        if number % world.size == world.rank:
            mine |= {f"{name}:{kind}": t.clone().contiguous() for kind, t in tensors.items()}
    file = folder / f"parameters-{world.rank:05d}-of-{world.size:05d}.safetensors"
    save_file(mine, file)
    entries = gather_from_ranks((file.name, *_fingerprint(file)))
    # of the lanes of other ranks, a rank knows only where they stood at its start
    own = {lane: c for lane, c in state.cursors.items() if lane % world.size == world.rank}
    cursors = {lane: c for part in gather_from_ranks(own) for lane, c in part.items()}
    if world.is_first:
        data = {
            **replace(state, cursors=cursors).to_json(),
            "optimizer_steps": engine.optimizer_steps,
        }
        _write_json(folder / "state.json", data)
        entries.append(("state.json", *_fingerprint(folder / "state.json")))
        files = {name: {"bytes": size, "sha256": sha} for name, size, sha in entries}
        _write_json(folder / MANIFEST, {"step": state.step, "files": files})
        for old in complete(root)[keep:]:
            _remove(old)
    barrier()
    return folder


def complete(root: Path) -> list[Path]:
    """Return the folders that have a manifest, newest first."""
    found = [
        (int(match[1]), path)
        for path in (root.iterdir() if root.is_dir() else ())
        if (match := _NAME.fullmatch(path.name)) and (path / MANIFEST).is_file()
    ]
    return [path for _, path in sorted(found, reverse=True)]


def damage(folder: Path) -> str | None:
    """Check every file of a checkpoint against its manifest; return what is wrong, if anything."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        for name, entry in files.items():
            size, sha256 = _fingerprint(folder / name, sync=False)
            if size != entry["bytes"]:
                return f"{folder / name} has {size} bytes, and its manifest says {entry['bytes']}"
            if sha256 != entry["sha256"]:
                return f"{folder / name} does not have the sha256 that its manifest says"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except (ValueError, KeyError, TypeError):
        return f"{folder / MANIFEST} is no manifest"
    return None


def find(root: Path, resume: str) -> Path | None:
    """Choose the checkpoint to go on from: the newest undamaged one, or the one that is named.

    Args:
        root: The run's checkpoint folder.
        resume: `auto`, `never`, or a checkpoint's path.

    Returns:
        Its folder, or None to start afresh.

    Raises:
        ValueError: If the named one is none or is damaged; if there are some and `never` is asked;
            if there are some and all are damaged.
    """
    if resume not in ("auto", "never"):
        named = Path(resume)
        if not (named / MANIFEST).is_file():
            raise ValueError(
                f"checkpoint.resume={resume}: no complete checkpoint ({MANIFEST} is missing)"
            )
        if (problem := damage(named)) is not None:
            raise ValueError(f"checkpoint.resume={resume}: {problem}")
        return named
    found = complete(root)
    if found and resume == "never":
        raise ValueError(
            f"{root} has checkpoints and checkpoint.resume=never; choose another run.name, or auto"
        )
    for folder in found:
        if (problem := damage(folder)) is None:
            return folder
        log.warning("damaged checkpoint passed over: %s", problem)
    if found:
        raise ValueError(f"every checkpoint in {root} is damaged; choose another run.name")
    return None


def load(folder: Path) -> Checkpoint:
    """Read a checkpoint whole, on the CPU."""
    data = json.loads((folder / "state.json").read_text())
    tensors: dict[str, dict[str, Tensor]] = {}
    for file in sorted(folder.glob("parameters-*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():
                name, _, kind = key.rpartition(":")
                tensors.setdefault(name, {})[kind] = opened.get_tensor(key)
    return Checkpoint(folder, TrainState.from_json(data), data["optimizer_steps"], tensors)


def _fingerprint(file: Path, *, sync: bool = True) -> tuple[int, str]:
    """Return a file's size and sha256, once its bytes are on the disk."""
    with file.open("rb") as opened:
        if sync:
            os.fsync(opened.fileno())
        digest = hashlib.file_digest(opened, "sha256")
        return opened.tell(), digest.hexdigest()


def _write_json(file: Path, data: Mapping[str, Any]) -> None:
    """Write a file that is whole or not there, and on the disk on return."""
    temporary = file.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as opened:
        json.dump(data, opened, indent=1)
        opened.flush()
        os.fsync(opened.fileno())
    temporary.rename(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _remove(folder: Path) -> None:
    """Remove a checkpoint, its manifest first, so that no half of one counts."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
