"""A request to stop, from a scheduler or a person, kept until the step's end.

It comes as SIGTERM or SIGUSR1 to a rank, or as a file: `roformer train` makes the file when it is
told to stop itself, since launchers that are signalled end ranks one after another. Its own death
counts as well, or its ranks would train on unseen. The ranks agree in the step's last sum, so all
of them stop after the same step, whichever was told.
"""

import signal
from pathlib import Path
from types import FrameType


class Preempted(Exception):
    """Training was asked to stop, and has saved."""


class StopRequest:
    """Whether this rank was asked to stop."""

    def __init__(self, file: Path, parent: int | None = None) -> None:
        """Make a request that `file`, or the end of the process `parent`, grants like a signal."""
        self._file = file
        self._parent = None if parent is None else Path(f"/proc/{parent}")
        self._signalled = False

    def install(self) -> None:
        """Listen to SIGTERM and SIGUSR1 from here on."""
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._ask)

    @property
    def requested(self) -> bool:
        """Whether to stop after this step."""
        orphaned = self._parent is not None and not self._parent.exists()
        return self._signalled or self._file.exists() or orphaned

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
