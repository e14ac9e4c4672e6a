"""What is kept of a run while it trains, and the marker of how it ended."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from launch.preflight import Prepared, fingerprints
from launch.run_folder import DONE, REQUEUE, STOP, changes, lock_folder, open_folder, write_text
from trainer.distributed import World
from trainer.metrics import MetricsFile
from trainer.preemption import Preempted
from trainer.tracking import Status, Tracker


@contextmanager
def recording(
    prepared: Prepared, world: World, console: Console | None
) -> Iterator[MetricsFile | None]:
    """Keep a run's folder while it trains: metrics, tracking, and the marker of how it ended.

    The first rank does this; the others get None.
    """
    if not world.is_first:
        yield None
        return
    config = prepared.config
    facts = fingerprints(prepared.tokenizer, prepared.train, prepared.eval)
    if console is not None:
        for change in changes(config, facts):
            console.print(
                f"{config.run.name}  changed since the last start: {change}",
                highlight=False,
                markup=False,
            )
    place = {"hosts": list(prepared.hosts), "slurm_job": os.environ.get("SLURM_JOB_ID")}
    folder = open_folder(config, {**facts, "world": world.size, **place})
    lock = lock_folder(folder)
    tracker = Tracker(folder, config.tracking.mlflow)
    tracker.start()
    status: Status = "FAILED"
    try:
        with lock, MetricsFile(folder / "metrics.jsonl") as metrics:
            yield metrics
        write_text(folder / DONE, "")
        (folder / STOP).unlink(missing_ok=True)  # it came too late
        status = "FINISHED"
    except Preempted:
        write_text(folder / REQUEUE, "")
        (folder / STOP).unlink(missing_ok=True)
        status = "KILLED"
        raise
    finally:
        # a scheduler's patience, or that of ranks which have failed, is shorter than a new store's
        timeout_s = None if status == "FINISHED" else 10.0
        if (missed := tracker.close(status, timeout_s)) is not None and console is not None:
            console.print(missed, style="yellow", highlight=False, markup=False)
