"""A request to stop, from a scheduler, a person or the clock, kept until all ranks can grant it.

It comes as SIGTERM or SIGUSR1 to a rank, as a file, as the end of the `roformer` process that
started the ranks, or by `run.time_limit`. Launchers that are signalled end ranks one after another,
so `roformer train` makes the file when it is told to stop itself, and so does a rank: by the file
every rank hears of it at once, wherever it runs. The ranks then agree in a sum that they form
anyway, so all of them stop after the same step, whichever was told.

A thread watches for all this, and signals its own process: a rank that waits for data, perhaps for
ever, is woken by that.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
LOOK_S, WAKE_S = 0.2, 5.0


class Preempted(Exception):
    """Training was asked to stop, and has saved."""


class Interrupted(Exception):
    """A wait was given up, for this rank is asked to stop."""


def hold_signals() -> None:
    """Keep requests for later, from before the seconds that it takes to import torch."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


@contextmanager
def signals_held() -> Iterator[None]:
    """Keep requests for later in this block; what it has not released arrives at its end."""
    hold_signals()
    try:
        yield
    finally:
        release_signals()


def release_signals() -> None:
    """Let what `hold_signals` has kept arrive."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


class StopRequest:
    """Whether this rank was asked to stop."""

    def __init__(
        self,
        file: Path,
        parent: int | None = None,
        *,
        deadline: float | None = None,
        grace_s: float = 60.0,
    ) -> None:
        """Make a request.

        Args:
            file: Asks when it is there; made when this rank is asked in another way.
            parent: A process whose end asks.
            deadline: Unix time that asks.
            grace_s: Seconds after which a rank that was asked and still runs is ended by force.
        """
        self._file = file
        self._parent = None if parent is None else Path(f"/proc/{parent}")
        self._deadline = deadline
        self._grace_s = grace_s
        self._signalled = self._granted = self._waits = False

    def install(self) -> None:
        """Listen from here on, also to what `hold_signals` has kept."""
        for number in SIGNALS:
            signal.signal(number, self._ask)
        release_signals()
        threading.Thread(target=self._watch, name="stop request", daemon=True).start()

    @property
    def requested(self) -> bool:
        """Whether to stop."""
        return self._signalled or self._file.exists() or self._asked_here()

    def grant(self) -> None:
        """Note that all ranks have agreed to stop; the file is not made any more."""
        self._granted = True

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """End what waits in this block when a request comes.

        One that was there before gives it a few seconds: a run that is always stopped early then
        still makes a step each time.

        Raises:
            Interrupted: When it was.
        """
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def _asked_here(self) -> bool:
        late = self._deadline is not None and time.time() >= self._deadline
        return late or (self._parent is not None and not self._parent.exists())

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        if self._waits:
            self._waits = False
            raise Interrupted

    def _watch(self) -> None:
        """Spread a request to all ranks; wake this one's waits; end it when its time is over."""
        while not self.requested:
            time.sleep(LOOK_S)
        started = time.monotonic()
        if not (self._file.exists() or self._granted):
            with suppress(OSError):  # a full disk: the ranks still agree after a step
                self._file.touch()
        while time.monotonic() < started + self._grace_s:
            if not self._granted:
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(min(WAKE_S, self._grace_s / 4))
        print(
            f"roformer: process {os.getpid()} was asked to stop and still runs after "
            f"checkpoint.grace_seconds={self._grace_s:g}: ended by force",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
