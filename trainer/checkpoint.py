"""Checkpoints: complete, verified, and the same for any world, ZeRO stage and precision.

    checkpoints/step-00001200/
        parameters-00000-of-00002.safetensors   every second parameter: value, exp_avg, exp_avg_sq
        parameters-00001-of-00002.safetensors   the others
        state.json                              progress, cursors of all lanes, Adam's step count
        MANIFEST.json                           size and sha256 of each file, written last

A folder without a manifest is no checkpoint. Removal takes the manifest first. Every parameter is
stored whole, in fp32, under its name; the ranks that wrote it are of no account when it is read.

A save has two halves. `begin` copies the state to host memory, and a thread of each rank writes its
copy while training goes on; `Save.finish`, some steps later, collects the sizes and hashes from all
ranks and writes the manifest. Only these two talk to other ranks, so no thread does.

    step 1200  begin  |-- copy --|
    1201, 1202, ...              |--- write, fsync, hash (thread) ---|
    1207       finish                                                |- manifest -|
"""

import hashlib
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.distributed import World, gather_from_ranks
from trainer.state import TrainState

if TYPE_CHECKING:  # importing deepspeed takes seconds, which a look for checkpoints need not pay
    from trainer.engine import Engine

log = logging.getLogger(__name__)

MANIFEST = "MANIFEST.json"
_NAME = re.compile(r"step-\d{8,}")


@dataclass(frozen=True)
class Checkpoint:
    """What a complete checkpoint holds."""

    folder: Path
    state: TrainState
    optimizer_steps: int
    loss_scale: Mapping[str, float]
    """See `Engine.loss_scale`."""
    order: str
    """Fingerprint of what fixes the order of samples, to which the cursors belong."""
    tensors: Mapping[str, Mapping[str, Tensor]]
    """By parameter name: `value`, and Adam's `exp_avg` and `exp_avg_sq` after the first step."""

    @property
    def weights(self) -> dict[str, Tensor]:
        """The model's state dict."""
        return {name: kinds["value"] for name, kinds in self.tensors.items()}


class SaveFailed(Exception):
    """A checkpoint could not be written, or must not be; what was complete before still is."""


def save(
    root: Path, engine: "Engine", state: TrainState, *, world: World, keep: int, keep_every: int = 0
) -> Path:
    """Write a checkpoint of all ranks, whole on return; see `begin` and `Save.finish`."""
    saving = begin(root, engine, state, world=world)
    saving.finish(keep=keep, keep_every=keep_every)
    return saving.folder


def begin(
    root: Path, engine: "Engine", state: TrainState, *, world: World, order: str = ""
) -> "Save":
    """Copy the state of all ranks to host memory, and start to write it.

    Every rank must call it. `order` is a fingerprint of what fixes the order of samples.

    Raises:
        SaveFailed: On all ranks, where a weight is no finite number or the folder can't be made.
    """
    started = time.perf_counter()
    folder = root / f"step-{state.step:08d}"
    problem = None
    if world.is_first:
        try:
            _remove(folder)  # what a kill left half-written
            folder.mkdir(parents=True)
        except OSError as error:
            problem = f"{error.filename}: {error.strerror}"
    mine: dict[str, Tensor] = {}
    for number, (name, tensors) in enumerate(engine.gather_state()):
        if number % world.size == world.rank:
            for kind, tensor in tensors.items():
                mine[f"{name}:{kind}"] = tensor.clone().contiguous()
                if problem is None and not bool(torch.isfinite(tensor).all()):
                    problem = f"{kind} of {name} is not finite everywhere"
    # of the lanes of other ranks, a rank knows only where they stood at its start
    own = {lane: c for lane, c in state.cursors.items() if lane % world.size == world.rank}
    parts = gather_from_ranks((problem, own))
    problem = next((problem for problem, _ in parts if problem), None)
    if problem is not None:
        if world.is_first:
            _remove(folder)
        raise SaveFailed(f"no checkpoint of step {state.step}: {problem}")
    cursors = {lane: c for _, part in parts for lane, c in part.items()}
    data = {
        **replace(state, cursors=cursors).to_json(),
        "optimizer_steps": engine.optimizer_steps,
        "loss_scale": engine.loss_scale,
        "order": order,
    }
    return Save(folder, mine, data, world, time.perf_counter() - started)


class Save:
    """A checkpoint on its way to the disk."""

    def __init__(
        self,
        folder: Path,
        tensors: dict[str, Tensor],
        data: dict[str, Any],
        world: World,
        stall_s: float,
    ) -> None:
        self.folder = folder
        self.step = int(data["step"])
        self.stall_s = stall_s
        """Seconds that training has waited for it."""
        self._tensors = tensors
        self._data = data
        self._world = world
        self._entries: list[tuple[str, int, str]] = []
        self._problem: str | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_written(self) -> bool:
        """Whether this rank's part is on the disk, or failed."""
        return not self._thread.is_alive()

    def finish(self, *, keep: int, keep_every: int = 0) -> None:
        """Wait for all ranks' parts and write the manifest; remove what is no longer kept.

        Every rank must call it. The newest `keep` stay, and with `keep_every` those of each
        multiple of so many steps.

        Raises:
            SaveFailed: On all ranks, where the disk refused a part; the folder is removed then.
            BaseException: On this rank, what else ended the writing of its part.
        """
        started = time.perf_counter()
        self._thread.join()
        if self._error is not None:
            raise self._error
        parts = gather_from_ranks((self._problem, self._entries))
        problem = next((problem for problem, _ in parts if problem), None)
        if self._world.is_first:
            entries = [entry for _, part in parts for entry in part]
            problem = problem or self._complete(entries, keep, keep_every)
        problem = gather_from_ranks(problem)[0]
        self.stall_s += time.perf_counter() - started
        if problem is not None:
            if self._world.is_first:
                _remove(self.folder)
            raise SaveFailed(f"no checkpoint of step {self.step}: {problem}")

    def _run(self) -> None:
        """Be the thread: whatever ends it is told, or a part would be missing and nobody say so."""
        try:
            self._write()
        except BaseException as error:
            self._error = error

    def _write(self) -> None:
        """Write this rank's part."""
        rank, size = self._world.rank, self._world.size
        file = self.folder / f"parameters-{rank:05d}-of-{size:05d}.safetensors"
        try:
            save_file(self._tensors, file)
            self._entries.append((file.name, *_fingerprint(file)))
            if self._world.is_first:
                file = self.folder / "state.json"
                _write_json(file, self._data)
                self._entries.append((file.name, *_fingerprint(file)))
        except (OSError, SafetensorError) as error:
            self._problem = f"{file}: {getattr(error, 'strerror', None) or error}"
        self._tensors = {}

    def _complete(
        self, entries: list[tuple[str, int, str]], keep: int, keep_every: int
    ) -> str | None:
        files = {name: {"bytes": size, "sha256": sha} for name, size, sha in entries}
        try:
            _write_json(self.folder / MANIFEST, {"step": self.step, "files": files})
            _sync_folder(self.folder.parent)
        except OSError as error:
            return f"{self.folder / MANIFEST}: {error.strerror}"
        for old in complete(self.folder.parent)[keep:]:
            if not keep_every or step_of(old) % keep_every:
                _remove(old)
        for path in self.folder.parent.iterdir():
            if _NAME.fullmatch(path.name) and not (path / MANIFEST).exists():
                _remove(path)  # what kills have left half-written or half-removed
        return None


def complete(root: Path) -> list[Path]:
    """Return the folders that have a manifest, newest first."""
    found = [
        path
        for path in (root.iterdir() if root.is_dir() else ())
        if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()
    ]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """Return the step that a checkpoint's folder is named after."""
    return int(folder.name.removeprefix("step-"))


def set_aside_after(root: Path, step: int) -> list[Path]:
    """Rename the checkpoints of later steps, damaged or of a past given up, so that none counts.

    Or the newest that are kept would be theirs, and not those that the run writes from here on.
    """
    moved = []
    for folder in complete(root):
        if step_of(folder) > step:
            aside = folder.with_name(f"{folder.name}.aside-{time.time_ns()}")
            folder.rename(aside)
            moved.append(aside)
    return moved


def damage(folder: Path, *, in_full: bool = True) -> str | None:
    """Check a checkpoint's files against its manifest; return what is wrong, if anything.

    Without `in_full` their sizes alone, which takes no time.
    """
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        for name, entry in files.items():
            size = (folder / name).stat().st_size
            if size != entry["bytes"]:
                return f"{folder / name} has {size} bytes, and its manifest says {entry['bytes']}"
            if not in_full:
                continue
            _, sha256 = _fingerprint(folder / name, sync=False)
            if sha256 != entry["sha256"]:
                return f"{folder / name} does not have the sha256 that its manifest says"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except (ValueError, KeyError, TypeError):
        return f"{folder / MANIFEST} is no manifest"
    return None


def find(root: Path, resume: str, *, in_full: bool = True) -> Path | None:
    """Choose the checkpoint to go on from: the newest undamaged one, or the one that is named.

    A named one of another folder is where a run begins: once it has its own, these are newer.

    Args:
        root: The run's checkpoint folder.
        resume: `auto`, `never`, or a checkpoint's path.
        in_full: See `damage`.

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
        is_own = named.absolute().parent == root.absolute()
        if not is_own and complete(root):
            log.warning("goes on from %s, for it has begun from %s before", root, named)
            return find(root, "auto", in_full=in_full)
        if (problem := damage(named, in_full=in_full)) is not None:
            raise ValueError(f"checkpoint.resume={resume}: {problem}")
        return named
    found = complete(root)
    if found and resume == "never":
        raise ValueError(
            f"{root} has checkpoints and checkpoint.resume=never; choose another run.name, or auto"
        )
    for folder in found:
        if (problem := damage(folder, in_full=in_full)) is None:
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
    return Checkpoint(
        folder,
        TrainState.from_json(data),
        data["optimizer_steps"],
        data["loss_scale"],
        data["order"],
        tensors,
    )


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
    _sync_folder(file.parent)


def _sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _remove(folder: Path) -> None:
    """Remove a checkpoint, its manifest first, so that no half of one counts."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
