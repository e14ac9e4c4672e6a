"""metrics.jsonl: one JSON object a logged step, the source of truth of a run's curves.

A run that goes on after a kill may write a step again: the last object of a step counts. JSON knows
neither NaN nor infinity; they are written as null.
"""

import hashlib
import json
import math
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from data_pipeline.mixture import Mixture
from trainer.curriculum import Factors, Stage
from trainer.state import TrainState

Value = float | int | str | None | dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave; sums are over the whole global batch."""

    total: float
    """Loss summed over targets, nats."""
    correct: float
    targets: float
    grad_norm: float | None
    """2-norm of the whole gradient before clipping."""
    lr: float
    seconds: float
    waited_s: float
    """Of these, waiting for data (this rank)."""
    lengths: tuple[int, ...]
    """Tokens of this rank's pieces."""
    stop: bool
    """Whether some rank was asked to stop."""
    batch_hash: str | None


class Recorder:
    """Adds up steps, and makes a record of them where it is time to log."""

    def __init__(
        self,
        file: "MetricsFile | None",
        *,
        every_steps: int,
        device: torch.device,
        flops: Callable[[Sequence[int], int], int],
        peak_flops: float,
        sources: "Callable[[TrainState], Mapping[str, Value]]" = lambda state: {},
    ) -> None:
        """Make it for one rank.

        Args:
            file: Where records go; the first rank has one.
            every_steps: Steps between records, besides those with an evaluation or a hash.
            device: Whose memory is told.
            flops: Operations of a rank's step from the lengths of its pieces and its targets.
            peak_flops: FLOP/s that its device can reach.
            sources: What of the data was read so far, see `sources_read`.
        """
        self._file = file
        self._every_steps = every_steps
        self._device = device
        self.flops = flops
        self._peak_flops = peak_flops
        self._sources = sources
        self._window: list[StepResult] = []

    def record(
        self,
        stage: Stage,
        factors: Factors,
        state: TrainState,
        result: StepResult,
        evaluation: Mapping[str, Value],
    ) -> dict[str, Value] | None:
        """Add a step; return its record where one is due: means since the last one."""
        self._window.append(result)
        due = state.step % self._every_steps == 0 or state.step == stage.last_step
        if not (due or evaluation or result.batch_hash):
            return None
        steps, self._window = self._window, []
        targets = sum(step.targets for step in steps)
        seconds = sum(step.seconds for step in steps)
        flops = sum(self.flops(s.lengths, round(s.targets / factors.world)) for s in steps)
        record: dict[str, Value] = {
            "elapsed_s": round(state.elapsed_s, 3),
            "step": state.step,
            "tokens": state.tokens,
            "stage": stage.name,
            "seq_len": stage.seq_len,
            "global_batch": stage.global_batch,
            "micro_batch": factors.micro_batch,
            "accumulation": factors.accumulation,
            "lr": result.lr,
            "train/loss": sum(step.total for step in steps) / max(targets, 1.0),
            "train/accuracy": sum(step.correct for step in steps) / max(targets, 1.0),
            "train/targets": int(targets),
            "grad_norm": result.grad_norm,
            "perf/tokens_per_s": len(steps) * stage.step_tokens / seconds,
            "perf/mfu": flops / seconds / self._peak_flops,
            "perf/data_wait_s": sum(step.waited_s for step in steps),
            "memory/peak_gib": peak_memory_gib(self._device),
            **evaluation,
            **self._sources(state),
        }
        if result.batch_hash:
            record["data/hash"] = result.batch_hash
        if self._file is not None:
            self._file.write(record)
        return record


def sources_read(mixture: Mixture, seed: int, lanes: int, state: TrainState) -> dict[str, Value]:
    """Return tokens and epochs of each source, and what was left out, over the whole run.

    Epochs of tars without an index are those of this rank's lanes, in whole shards.
    """
    read: dict[str, Value] = {}
    for source, name in enumerate(mixture.names):
        tokens = state.source_tokens.get(name, 0)
        if name:
            read[f"data/tokens/{name}"] = tokens
        key = f"data/epochs/{name}" if name else "data/epochs"
        read[key] = mixture.epochs(source, tokens, seed, lanes, state.cursors)
    if state.skipped:
        for kind in ("shards", "samples"):
            read[f"data/skipped_{kind}"] = sum(count[kind] for count in state.skipped.values())
        read["data/skipped"] = state.skipped
    return read


def hash_rows(digests: Sequence[Sequence[int]], *, first_row: int) -> str:
    """Hash a global batch from its rows' digests: the same however ranks share the rows.

    Args:
        digests: By rank, those of its rows in order; row j of the run is with rank j mod world.
        first_row: Number of the batch's first row in the run.
    """
    world = len(digests)
    rows = [iter(rank) for rank in digests]
    ordered = [next(rows[(first_row + n) % world]) for n in range(sum(map(len, digests)))]
    return hashlib.sha256(struct.pack(f"<{len(ordered)}q", *ordered)).hexdigest()[:16]


class MetricsFile:
    """Appends records; each is on its way to the disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        _end_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Value]) -> None:
        """Append one record, with the time (unix seconds) in front."""
        stamped = {"time": round(time.time(), 3), **record}
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in stamped.items()
        }
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def _end_torn_line(path: Path) -> None:
    """Close a line that a kill cut in two, so that the next record stands on a line of its own."""
    if path.exists() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")


def peak_memory_gib(device: torch.device) -> float:
    """Return the most memory this process has held: on its GPU, or else resident (GiB)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


def measure_matmul_peak(device: torch.device, dtype: torch.dtype, size: int = 1024) -> float:
    """Return the FLOP/s that large matrix products reach here: what MFU is a share of."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = 0.0
    for _ in range(4):
        _synchronize(device)
        start = time.perf_counter()
        a @ b
        _synchronize(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
