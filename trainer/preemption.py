"""A request to stop, from a scheduler or a person, kept until the step's end.

SIGTERM and SIGUSR1 only set a flag. The ranks agree on it in the step's last sum, so all of them
stop after the same step, whichever was told.
"""

import signal
from types import FrameType


class Preempted(Exception):
    """Training was asked to stop, and has saved."""


class StopRequest:
    """Whether this rank was asked to stop."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> None:
        """Listen to SIGTERM and SIGUSR1 from here on."""
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
