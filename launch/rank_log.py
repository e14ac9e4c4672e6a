"""Where the ranks' words go: the first rank's to the terminal, the others' into the run's folder.

    runs/NAME/logs/rank-00003.log

A rank that fails repeats its last lines on the terminal, whatever launcher started it.
"""

import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a rank's place; torch comes with it
    from trainer.distributed import World

LOGS = "logs"
LAST_LINES = 25


class RankLog:
    """One rank's standard output and error."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._start = 0
        self._terminal = 2
        self._title = ""

    def open(self, folder: Path, world: "World") -> None:
        """Turn both to a file, on every rank but the first."""
        if world.is_first:
            return
        path = folder / LOGS / f"rank-{world.rank:05d}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._title = f"rank {world.rank} on {socket.gethostname()}"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(file, f"--- {time.strftime('%F %T')} {self._title}, pid {os.getpid()}\n".encode())
        self._path, self._start = path, os.fstat(file).st_size
        self._terminal = os.dup(2)
        os.set_inheritable(self._terminal, False)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)

    def close(self) -> None:
        """Have nothing to repeat: another rank has said it."""
        self._path = None

    def repeat_last_lines(self) -> None:
        """Show the end of what this start has written, if it has written anything."""
        if self._path is None:
            return
        sys.stdout.flush()
        sys.stderr.flush()
        with self._path.open("rb") as file:
            file.seek(self._start)
            text = file.read().decode(errors="replace")
        lines = [f"  {line}" for line in text.splitlines()[-LAST_LINES:]]
        if lines:
            head = f"roformer: {self._title} failed; the last lines of {self._path}:"
            os.write(self._terminal, "\n".join((head, *lines, "")).encode())
