"""A small disk that is full when a test wants it to be: a mount of its own, which needs root."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    """Mount a disk of so many MiB in memory at a new folder; skip where that is forbidden."""
    if shutil.which("mount") is None:
        pytest.skip("cannot mount a small disk: there is no mount")
    folder.mkdir()
    try:
        mount(folder, mib)
    except subprocess.CalledProcessError as refused:
        pytest.skip(f"cannot mount a small disk: {refused.stderr.strip()}")
    try:
        yield folder
    finally:
        unmount(folder)


def mount(folder: Path, mib: int) -> None:
    """Mount a disk in memory at a folder that is there."""
    options = ("-t", "tmpfs", "-o", f"size={mib}m", "tmpfs")
    subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True, check=True)


def unmount(folder: Path) -> None:
    """Take it away, whoever still uses it."""
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(ballast: Path) -> None:
    """Take all room that is left on a disk."""
    with ballast.open("wb", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:  # no room for so much
                continue
