"""When a run is saved, and what happens when the disk refuses."""

import logging
from collections.abc import Callable
from pathlib import Path

from trainer import checkpoint
from trainer.checkpoint import Save, SaveFailed
from trainer.config import CheckpointConfig
from trainer.distributed import World
from trainer.engine import Engine
from trainer.state import TrainState

log = logging.getLogger(__name__)


class Saver:
    """Begins checkpoints and completes them while training goes on; one at a time.

    All ranks must call `begin` and `complete` after the same steps.
    """

    def __init__(
        self,
        root: Path,
        engine: Engine,
        world: World,
        settings: CheckpointConfig,
        *,
        order: str,
        saved_step: int,
        pulse: Callable[[str], None],
    ) -> None:
        """Make it for a run's folder of checkpoints.

        Args:
            root: Where they go.
            engine: What they hold.
            world: The ranks.
            settings: How often, how many stay, and what a full disk means.
            order: Fingerprint of what fixes the order of samples.
            saved_step: The step that the run goes on from.
            pulse: See `trainer.liveness`.
        """
        self._root = root
        self._engine = engine
        self._world = world
        self._settings = settings
        self._order = order
        self._saved_step = saved_step
        self._pulse = pulse
        self._saving: Save | None = None
        self._stall_s = 0.0

    def is_due(self, step: int) -> bool:
        """Whether a step is followed by a save."""
        every = self._settings.every_steps
        return every > 0 and step % every == 0

    @property
    def is_written(self) -> bool:
        """Whether this rank's part of the one that was begun is written."""
        return self._saving is not None and self._saving.is_written

    def take_stall_s(self) -> float:
        """Return the seconds that training has waited for saves since the last call."""
        stall_s, self._stall_s = self._stall_s, 0.0
        return stall_s

    def begin(self, state: TrainState, *, is_last: bool = False) -> None:
        """Begin a checkpoint of this step, unless it is the one that the run has gone on from.

        Raises:
            SaveFailed: By policy, and always where `is_last` says that no other comes after it.
        """
        if state.step == self._saved_step and state.step:
            return
        self.complete()
        self._pulse("saving")
        try:
            self._saving = checkpoint.begin(
                self._root, self._engine, state, world=self._world, order=self._order
            )
        except SaveFailed as error:
            self._failed(error, is_last)
        else:
            self._saved_step = state.step
            self._stall_s += self._saving.stall_s

    def complete(self, *, is_last: bool = False) -> None:
        """Complete the checkpoint that was begun, if there is one.

        Raises:
            SaveFailed: As `begin`.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        self._pulse("saving")
        before = saving.stall_s
        try:
            saving.finish(keep=self._settings.keep, keep_every=self._settings.keep_every)
        except SaveFailed as error:
            self._saved_step = -1
            self._failed(error, is_last)
        self._stall_s += saving.stall_s - before

    def _failed(self, error: SaveFailed, is_last: bool) -> None:
        found = checkpoint.complete(self._root)
        last = f"the last complete one is {found[0]}" if found else "there is no earlier one"
        if is_last or self._settings.on_error == "stop":
            raise SaveFailed(f"{error}; {last}; start again once that is mended") from None
        if self._world.is_first:
            log.warning("%s; %s; trains on (checkpoint.on_error=go_on)", error, last)
