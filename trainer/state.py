"""How far a run has come: all that training must know to go on, beside weights and optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from data_pipeline.lanes import Cursor


@dataclass
class TrainState:
    """Progress of a run; the loop is the only one that changes it."""

    step: int = 0
    """Completed steps."""
    tokens: int = 0
    """Consumed tokens."""
    rows: int = 0
    """Consumed rows; the next one comes from lane `rows % lanes`."""
    elapsed_s: float = 0.0
    """Time spent training, over all starts."""
    bad_steps: int = 0
    """Steps that were skipped, for their loss or gradient was no number."""
    bad_in_a_row: int = 0
    """Of these, the last ones without a good one between."""
    cursors: dict[int, Cursor] = field(default_factory=dict)
    """Where each lane goes on; a rank knows those of its own lanes."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data for state.json."""
        cursors = {str(lane): list(cursor) for lane, cursor in sorted(self.cursors.items())}
        return {**vars(self), "cursors": cursors}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote."""
        cursors = {int(lane): Cursor(*cursor) for lane, cursor in data["cursors"].items()}
        names = ("step", "tokens", "rows", "elapsed_s", "bad_steps", "bad_in_a_row")
        return cls(**{name: data[name] for name in names if name in data}, cursors=cursors)
