"""metrics.jsonl: one JSON object a logged step, the source of truth of a run's curves.

A run that goes on after a kill may write a step again: the last object of a step counts. JSON knows
neither NaN nor infinity; they are written as null.
"""

import errno
import hashlib
import json
import logging
import math
import os
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

log = logging.getLogger(__name__)

Value = float | int | str | None | dict[str, dict[str, int]]

LONGEST_RECORD = 65_536  # bytes, by far


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
    batch_hash: str | None
    is_bad: bool = False
    """Its loss or gradient was no number, and no update was made."""


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
        self.save_stall_s = 0.0
        """Time that training has waited for checkpoints since the last record."""

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
        good = [step for step in steps if not step.is_bad]
        targets = sum(step.targets for step in good)
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
            "train/loss": sum(step.total for step in good) / targets if targets else math.nan,
            "train/accuracy": sum(step.correct for step in good) / targets if targets else math.nan,
            "train/targets": int(targets),
            "train/bad_steps": state.bad_steps,
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
        if self.save_stall_s:
            record["perf/save_stall_s"], self.save_stall_s = round(self.save_stall_s, 4), 0.0
        if self._file is not None:
            self._file.write(record)
        return record

    def lacks_evaluation(self, step: int) -> bool:
        """Whether this rank's file has a record of a step without an evaluation."""
        record = self._file.last_record if self._file else None
        return record is not None and record.get("step") == step and "eval/loss" not in record

    def add_evaluation(self, evaluation: Mapping[str, Value]) -> None:
        """Write the file's last record once more, with an evaluation that a stop had cut off."""
        if self._file is not None and self._file.last_record is not None and evaluation:
            self._file.write({**self._file.last_record, **evaluation})


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
    """Appends records; each is on its way to the disk when `write` returns.

    What a full disk refuses is held in memory and tried again with the next record.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: list[bytes] = []
        self.last_record = _mend(path)
        """The last one written, by an earlier start too."""
        self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Value]) -> None:
        """Append one record, with the time (unix seconds) in front."""
        stamped = {**record, "time": round(time.time(), 3)}
        stamped = {"time": stamped.pop("time"), **stamped}
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in stamped.items()
        }
        self._held.append(json.dumps(finite, allow_nan=False).encode() + b"\n")
        self.last_record = finite
        try:
            self._flush()
        except OSError as error:
            if len(self._held) == 1:
                log.warning("%s: %s; held in memory", self._path, error.strerror)

    def _flush(self) -> None:
        while self._held:
            line, size = self._held[0], self._file.seek(0, 2)
            try:
                written = self._file.write(line)
                if written != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                self._file.truncate(size)
                raise
            del self._held[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raises OSError, naming the file, where records are held that the disk still refuses."""
        try:
            self._flush()
        except OSError as refused:
            text = f"{len(self._held)} records are lost: {refused.strerror}"
            if error is None:
                raise OSError(refused.errno, text, str(self._path)) from None
            log.warning("%s: %s", self._path, text)
        finally:
            self._file.close()


def _mend(path: Path) -> dict[str, Value] | None:
    """Close a line that a kill cut in two, so that the next record stands on a line of its own.

    Returns:
        The file's last whole record.
    """
    if not path.exists():
        return None
    with path.open("rb+") as file:
        file.seek(max(0, file.seek(0, 2) - LONGEST_RECORD))
        tail = file.read()
        if tail and not tail.endswith(b"\n"):
            file.write(b"\n")
    for line in reversed(tail.splitlines()):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            return record
    return None


def peak_memory_gib(device: torch.device) -> float:
    """Return the most memory this process has held: on its GPU, or else resident (GiB)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # not getrusage's: that begins at what the process which started this one has held
    status = Path("/proc/self/status").read_text(errors="replace")
    return int(status.partition("VmHWM:")[2].split()[0]) / 2**20  # in KiB there


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
