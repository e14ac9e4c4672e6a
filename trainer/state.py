"""How far a run has come: all that training must know to go on, beside weights and optimizer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from data_pipeline.lanes import Cursor
from data_pipeline.reading import Fault


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
    source_tokens: dict[str, int] = field(default_factory=dict)
    """Consumed tokens of each source of a mixture."""
    skipped: dict[str, dict[str, int]] = field(default_factory=dict)
    """By shard, whether it was left out whole (1), and how many samples of it."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data for state.json."""
        cursors = {str(lane): list(cursor) for lane, cursor in sorted(self.cursors.items())}
        return {**vars(self), "cursors": cursors}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote."""
        cursors = {int(lane): Cursor(*cursor) for lane, cursor in data["cursors"].items()}
        names = ("step", "tokens", "rows", "elapsed_s", "bad_steps", "bad_in_a_row")
        later = {name: data.get(name, {}) for name in ("source_tokens", "skipped")}
        return cls(**{name: data.get(name, 0) for name in names}, **later, cursors=cursors)

    def count_skipped(self, faults: Iterable[Fault]) -> list[Fault]:
        """Count what was left out, by shard; return what is new: a shard may be read many times."""
        new = []
        for fault in faults:
            counts = self.skipped.setdefault(fault.shard, {"shards": 0, "samples": 0})
            kind, count = ("samples", fault.samples) if fault.samples else ("shards", 1)
            if count > counts[kind]:
                counts[kind] = count
                new.append(fault)
        return new
