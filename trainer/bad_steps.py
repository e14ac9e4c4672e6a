"""Steps whose loss or gradient is no number: skipped by all ranks, counted, and told of.

The engine makes no update in them. `bad_steps.jsonl` names the documents that each was made of.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.lanes import Cursor
from data_pipeline.mixture import Mixture
from data_pipeline.provenance import documents_between
from trainer.distributed import World, gather_from_ranks
from trainer.state import TrainState

log = logging.getLogger(__name__)


class Diverged(Exception):
    """Too many steps in a row were skipped."""


@dataclass(frozen=True)
class BadSteps:
    """Counts them, and ends a run of too many in a row."""

    file: Path
    mixture: Mixture
    seed: int
    lanes: int
    max_in_a_row: int
    world: World

    def tell(
        self,
        state: TrainState,
        *,
        stage: str,
        lr: float,
        is_mine_finite: bool,
        begun_at: Mapping[int, Cursor],
    ) -> None:
        """Count a skipped step and write down its documents; every rank must call it.

        Where no rank's own loss is infinite or NaN, the gradient is, and every rank's are named.

        Args:
            state: After the step.
            stage: Its name.
            lr: Learning rate that the update would have had.
            is_mine_finite: Whether this rank's own loss is.
            begun_at: Where each lane of this rank's rows stood before them.

        Raises:
            Diverged: When it is the last of too many in a row.
        """
        state.bad_steps += 1
        state.bad_in_a_row += 1
        mine = {lane: (start, state.cursors[lane]) for lane, start in begun_at.items()}
        parts = gather_from_ranks((is_mine_finite, mine))
        ranks = [rank for rank, (is_finite, _) in enumerate(parts) if not is_finite]
        what = "loss" if ranks else "gradient"
        ranks = ranks or list(range(self.world.size))
        if self.world.is_first:
            stretches = [item for rank in ranks for item in parts[rank][1].items()]
            documents = sorted(
                {
                    f"{source.shard}:{source.key}"
                    for lane, (start, end) in stretches
                    for source in documents_between(
                        self.mixture,
                        seed=self.seed,
                        lane=lane,
                        lanes=self.lanes,
                        start=start,
                        end=end,
                    )
                }
            )
            record = {
                "step": state.step,
                "stage": stage,
                "lr": lr,
                "not_finite": what,
                "ranks": ranks,
                "documents": documents,
            }
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            log.warning(
                f"step {state.step} is skipped, for its {what} is no number (skipped so far: "
                f"{state.bad_steps}, in a row: {state.bad_in_a_row}); {self.file} names its "
                f"{len(documents)} documents, of ranks {ranks}"
            )
        if state.bad_in_a_row >= self.max_in_a_row:
            raise Diverged(
                f"{state.bad_in_a_row} steps in a row had a {what} that is no number, the last one "
                f"step {state.step} (stage {stage}, learning rate {lr:.3g}): lower optimizer.lr or "
                f"lengthen schedule.warmup; {self.file} names the documents "
                f"(trainer.max_bad_steps={self.max_in_a_row})"
            )
