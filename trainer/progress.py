"""What a person sees while a run trains: a bar on a terminal, plain lines elsewhere."""

import logging
from collections.abc import Mapping
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from trainer.curriculum import Factors, Stage
from trainer.metrics import Value

log = logging.getLogger(__name__)


class Progress:
    """Shows a run's steps; silent on all ranks but the first."""

    def __init__(self, name: str, total_steps: int, *, console: Console | None) -> None:
        """Make it for a run of `total_steps`; without a console it shows nothing."""
        self._console = console
        self._name = name
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
            disable=console is None or not console.is_terminal,
        )
        self._task = self._bars.add_task(name, total=total_steps, figures="")

    def enter(self, stage: Stage, factors: Factors) -> None:
        """Announce a stage with the three factors of its batch."""
        self.say(
            f"stage {stage.name}: {stage.num_steps} steps of {stage.global_batch} rows x "
            f"{stage.seq_len} tokens ({factors.micro_batch} rows x {factors.accumulation} "
            f"accumulated x {factors.world} ranks)"
        )

    def advance(self, step: int, record: Mapping[str, Value] | None) -> None:
        """Show a completed step, with its metrics where it was logged."""
        if record is None:
            self._bars.update(self._task, completed=step)
            return
        figures = _figures(record)
        self._bars.update(self._task, completed=step, figures=figures)
        if self._bars.disable or "eval/loss" in record:
            total = self._bars.tasks[0].total
            self.say(f"step {step}/{total:.0f}  {figures}{_evaluation(record)}")

    def tell_skipped(self, skipped: Mapping[str, Mapping[str, int]]) -> None:
        """Say what was left out of which shard, in the end."""
        for shard, counts in sorted(skipped.items()):
            parts = [f"{count} {what}" for what, count in counts.items() if count]
            self.say(f"left out in all, of {shard}: {', '.join(parts)}")

    def say(self, text: str) -> None:
        """Print a line."""
        if self._console is not None:
            self._console.print(f"{self._name}  {text}", highlight=False, markup=False)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


def _figures(record: Mapping[str, Value]) -> str:
    return (
        f"loss {record['train/loss']:.3f}  acc {record['train/accuracy']:.1%}  "
        f"lr {record['lr']:.2e}  {record['perf/tokens_per_s']:,.0f} tok/s"
    )


def _evaluation(record: Mapping[str, Value]) -> str:
    if "eval/loss" not in record:
        return ""
    return f"  held-out loss {record['eval/loss']:.3f}  acc {record['eval/accuracy']:.1%}"
