"""The training loop: for each remaining stage, enter it and step until its end.

rows -> collate -> forward -> sums of losses -> backward, step -> TrainState -> metrics
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice

import torch

from data_pipeline.batch import Batch, Example, collate
from data_pipeline.lanes import START, eval_rows
from data_pipeline.loader import open_stream
from data_pipeline.mixture import Mixture
from data_pipeline.reading import Fault, Shards
from data_pipeline.seeding import generator
from model.loss import Loss
from trainer.bad_steps import BadSteps
from trainer.config import EngineConfig, EvaluationConfig, ScheduleConfig
from trainer.curriculum import Factors, Stage, batch_factors, remaining
from trainer.distributed import World, gather_from_ranks, sum_over_ranks
from trainer.engine import Engine
from trainer.metrics import Recorder, StepResult, Value, hash_rows
from trainer.objectives import Objective
from trainer.preemption import Interrupted, Preempted, StopRequest
from trainer.progress import Progress
from trainer.saving import Saver
from trainer.schedule import learning_rate
from trainer.state import TrainState


@dataclass(frozen=True)
class Data:
    """The shards and how their rows become examples."""

    train: Mixture
    eval: Shards | None
    lanes: int
    workers: int
    objective: Callable[[float], Objective]
    """The objective at a stage's mask rate."""
    eval_objective: Objective


@dataclass(frozen=True)
class Settings:
    """The sections that the loop reads."""

    seed: int
    batch_hash: bool
    schedule: ScheduleConfig
    engine: EngineConfig
    evaluation: EvaluationConfig


@dataclass
class Trainer:
    """Everything that training touches; put together in `launch.train`."""

    settings: Settings
    stages: Sequence[Stage]
    data: Data
    engine: Engine
    world: World
    state: TrainState
    saver: Saver
    bad_steps: BadSteps
    recorder: Recorder
    progress: Progress
    stop: StopRequest
    redraw: Callable[[int], None]
    """Gives the model its random features of a step."""
    pulse: Callable[[str], None]
    """Told what this rank does, at every part of a step: see `trainer.liveness`."""
    stops: bool = False
    """Whether the ranks have agreed to stop."""

    def fit(self) -> None:
        """Train to the end of the last stage, evaluating and saving where it is time to.

        Raises:
            Preempted: When any rank was asked to stop, after saving.
            Diverged: When too many steps in a row had a loss or gradient that is no number.
            SaveFailed: When the disk refused a checkpoint, and `checkpoint.on_error` is stop.
        """
        with self.progress:
            self.catch_up()
            try:
                for stage in remaining(self.stages, self.state.step):
                    with self.enter(stage) as (factors, rows):
                        while self.state.step < stage.last_step:
                            if (result := self.train_step(stage, factors, rows)) is not None:
                                self.record(stage, factors, result)
                            self.save_or_stop()
            finally:
                self.progress.tell_skipped(self.state.skipped)
        self.saver.begin(self.state, is_last=True)
        self.saver.complete(is_last=True)

    def train_step(
        self, stage: Stage, factors: Factors, rows: Iterator[Example]
    ) -> StepResult | None:
        """Consume one global batch: the exact gradient of its mean loss, and one update.

        None where the ranks agree to stop, for one was asked to while it waited for its rows.
        """
        started = time.perf_counter()
        batches = self.next_batches(factors, rows)
        waited = time.perf_counter() - started
        self.pulse("training")
        targets, given_up = self.sum(sum(b.num_targets for b in batches or ()), batches is None)
        if batches is None or given_up:
            self.agree_to_stop()
            return None
        begun_at = {
            lane: self.state.cursors.get(lane, START) for b in batches for lane in b.cursors
        }
        self.advance(stage, batches)
        self.redraw(self.state.step)
        lr, total, correct = self.learning_rate(stage), 0.0, 0.0
        for number, batch in enumerate(batches):
            self.pulse("training")
            self.seed_dropout(number)
            loss = self.forward(batch)
            self.engine.backward(loss.total, targets)
            total += float(loss.total.detach())
            correct += float(loss.correct)
        is_mine_finite = math.isfinite(total)
        faults = [fault for batch in batches for fault in batch.faults]
        total, correct, stop, written, skips = self.sum(
            total, correct, self.stop.requested, self.saver.is_written, len(faults)
        )
        grad_norm = self.engine.step(lr, skip=not math.isfinite(total))
        is_bad = not (math.isfinite(total) and self.engine.is_sound(grad_norm))
        if skips:
            self.note_skipped(faults)
        if stop:
            self.agree_to_stop()
        if written == self.world.size:
            self.saver.complete()
        seconds = time.perf_counter() - started
        self.state.elapsed_s += seconds
        if is_bad:
            self.bad_steps.tell(
                self.state,
                stage=stage.name,
                lr=lr,
                is_mine_finite=is_mine_finite,
                begun_at=begun_at,
            )
        else:
            self.state.bad_in_a_row = 0
        return StepResult(
            total=total,
            correct=correct,
            targets=targets,
            grad_norm=grad_norm,
            lr=lr,
            seconds=seconds,
            waited_s=waited,
            lengths=tuple(length for batch in batches for length in batch.lengths),
            batch_hash=self.hash_of(batches) if self.settings.batch_hash else None,
            is_bad=is_bad,
        )

    def next_batches(self, factors: Factors, rows: Iterator[Example]) -> list[Batch] | None:
        """Wait for this rank's rows of a step; None when it was asked to stop meanwhile."""
        self.pulse("waiting for data")
        try:
            with self.stop.interrupting():
                return [
                    collate(list(islice(rows, factors.micro_batch)))
                    for _ in range(factors.accumulation)
                ]
        except Interrupted:
            return None

    @contextmanager
    def enter(self, stage: Stage) -> Iterator[tuple[Factors, Iterator[Example]]]:
        """Set the engine to a stage's batch, and open its rows where the last stage left them."""
        factors = batch_factors(
            seq_len=stage.seq_len,
            global_batch=stage.global_batch,
            world=self.world.size,
            device_tokens=self.settings.engine.device_tokens,
        )
        self.saver.complete()  # before loader processes are forked
        self.engine.set_accumulation(factors.accumulation)
        self.progress.enter(stage, factors)
        rows = open_stream(
            self.data.train.weighed(stage.mixture),
            seed=self.settings.seed,
            lanes=self.data.lanes,
            seq_len=stage.seq_len,
            rank=self.world.rank,
            world=self.world.size,
            workers=self.data.workers,
            first_row=self.state.rows,
            cursors=self.state.cursors,
            transform=self.data.objective(stage.mask_rate),
        )
        with closing(rows):
            yield factors, rows

    def record(self, stage: Stage, factors: Factors, result: StepResult) -> None:
        """Evaluate where it is due; log and show the step."""
        is_due = self.evaluation_is_due(stage) and not self.stops
        evaluation = self.evaluate(stage) if is_due else {}
        self.recorder.save_stall_s += self.saver.take_stall_s()
        record = self.recorder.record(stage, factors, self.state, result, evaluation)
        self.progress.advance(self.state.step, record)

    def catch_up(self) -> None:
        """Evaluate after the last step of an earlier start, where a stop has cut that off."""
        stage = next((s for s in self.stages if s.last_step >= self.state.step), self.stages[-1])
        lacks = gather_from_ranks(self.recorder.lacks_evaluation(self.state.step))[0]
        if self.state.step and lacks and self.evaluation_is_due(stage):
            self.recorder.add_evaluation(self.evaluate(stage))
            self.save_or_stop()

    def evaluate(self, stage: Stage) -> dict[str, Value]:
        """Weigh every held-out target once, whatever the world; {} when asked to stop meanwhile.

        All ranks read the same rows and take turns; where the last turn has none for a rank, it
        runs an empty batch, since under ZeRO-3 every rank must take part in every forward pass.
        """
        assert self.data.eval is not None
        seq_len = self.settings.evaluation.seq_len or stage.seq_len
        rows = eval_rows(self.data.eval, seq_len=seq_len, packing=self.data.train.packing)
        turn_rows = self.world.size * max(1, self.settings.engine.device_tokens // seq_len)
        total = correct = targets = 0.0
        skipped: dict[str, int] = {}
        self.engine.train(False)
        with torch.no_grad():
            while turn := list(islice(rows, turn_rows)):
                mine = turn[self.world.rank :: self.world.size]
                skipped |= {fault.shard: fault.samples for row in turn for fault in row.faults}
                batch = collate([self.data.eval_objective(row) for row in mine])
                loss = self.forward(batch)
                total += float(loss.total)
                correct += float(loss.correct)
                targets += batch.num_targets
                self.pulse("evaluating")
                if self.sum(self.stop.requested)[0]:
                    self.agree_to_stop()
                    break
        self.engine.train(True)
        if self.stops:
            return {}
        total, correct, targets = self.sum(total, correct, targets)
        return {
            "eval/loss": total / max(targets, 1.0),
            "eval/accuracy": correct / max(targets, 1.0),
            "eval/targets": int(targets),
            "eval/seq_len": seq_len,
            **({"eval/skipped": sum(n or 1 for n in skipped.values())} if skipped else {}),
        }

    def agree_to_stop(self) -> None:
        """Note that all ranks stop here."""
        self.stops = True
        self.stop.grant()

    def save_or_stop(self) -> None:
        """Save every so often; save and end when the ranks have agreed to stop."""
        if self.stops or self.saver.is_due(self.state.step):
            self.saver.begin(self.state, is_last=self.stops)
        if self.stops:
            self.saver.complete(is_last=True)
            raise Preempted(f"asked to stop; saved at step {self.state.step}")

    def evaluation_is_due(self, stage: Stage) -> bool:
        """Whether this step is followed by an evaluation: at stage ends, and every so often."""
        every, step = self.settings.evaluation.every_steps, self.state.step
        due = step == stage.last_step or (every > 0 and step % every == 0)
        return due and self.data.eval is not None

    def forward(self, batch: Batch) -> Loss:
        """Return the loss of a batch's targets."""
        batch = batch.to(self.engine.device)
        loss: Loss = self.engine.forward(
            batch.input_ids, batch.positions, batch.lengths, batch.target_index, batch.targets
        )
        return loss

    def advance(self, stage: Stage, batches: Sequence[Batch]) -> None:
        """Count a global batch as consumed, and keep where its lanes go on."""
        first_row = self.state.rows
        self.state.step += 1
        self.state.rows += stage.global_batch
        self.state.tokens += stage.step_tokens
        shares = self.data.train.weighed(stage.mixture).shares(first_row, stage.global_batch)
        for name, rows in zip(self.data.train.names, shares, strict=True):
            self.state.source_tokens[name] = (
                self.state.source_tokens.get(name, 0) + rows * stage.seq_len
            )
        for batch in batches:
            self.state.cursors |= batch.cursors

    def note_skipped(self, faults: Sequence[Fault]) -> None:
        """Count what any rank has left out, and say why."""
        of_all = [fault for mine in gather_from_ranks(faults) for fault in mine]
        for fault in self.state.count_skipped(of_all):
            more = f" (and {fault.samples - 1} samples more)" if fault.samples > 1 else ""
            self.progress.say(f"left out: {fault.reason}{more}")

    def learning_rate(self, stage: Stage) -> float:
        """Return the learning rate of the update that ends at this step."""
        schedule, last = self.settings.schedule, self.stages[-1]
        if schedule.unit == "steps":
            t, total = self.state.step, last.last_step
        else:
            t, total = self.state.tokens, sum(s.num_steps * s.step_tokens for s in self.stages)
        return learning_rate(t, peak=stage.lr, schedule=schedule, total=total)

    def seed_dropout(self, number: int) -> None:
        """Draw dropout from (seed, step, rank, micro-batch) alone: no state of it to save."""
        key = generator(self.settings.seed, self.state.step, self.world.rank, number)
        torch.manual_seed(int(key.integers(2**63)))

    def hash_of(self, batches: Sequence[Batch]) -> str:
        """Hash the global batch in row order, whichever ranks hold its rows."""
        mine = [digest for batch in batches for digest in batch.digests]
        first = self.state.rows - len(mine) * self.world.size
        return hash_rows(gather_from_ranks(mine), first_row=first)

    def sum(self, *values: float) -> list[float]:
        """Sum numbers over all ranks."""
        return sum_over_ranks(values, self.engine.device)
