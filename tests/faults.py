"""Faults on order: makes a chosen one happen at a chosen (rank, step, phase), and proves it did.

    python -m tests.faults train CONFIG.yaml ...        `roformer train`, whose ranks have faults
    deepspeed --module tests.faults CONFIG.yaml ...     ranks alone

A fault happens once: it leaves the file `marks/NUMBER` before it strikes, which `Plan.check`
looks for, and which keeps the next start from suffering it again.
"""

if __name__ == "__main__":  # as launch.train does
    from trainer.preemption import hold_signals

    hold_signals()

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.disks import fill

ROOT = Path(__file__).parents[1]
PLAN = "ROFORMER_TEST_FAULTS"

PHASES = ("start", "data", "forward", "backward", "update", "evaluate", "save", "write", "manifest")
"""save: the copy to host memory; write: the thread; manifest: before it is written."""
ENDS = ("kill", "stop", "hang", "raise", "kill_worker")
"""Kinds that end the run with a failure."""
ASKS = ("term", "usr1", "term_launcher", "usr1_launcher", "term_parent", "usr1_parent")
"""Kinds that ask it to save and end."""
HARMS = ("nan_loss", "nan_gradient", "nan_weights", "full", "stall", "pause", "fill", "free")
"""full: one file is refused; fill, free: the disk of the marks has no room, or has it again."""
LATE_S = {"stall": 600.0, "pause": 15.0}
"""Kinds of late rows; a pause is twice as long as a rank may be silent here."""


@dataclass(frozen=True)
class Fault:
    """What happens, where and when."""

    kind: str
    rank: int
    step: int
    """The step that is being made, counted from 1; 0: at the start."""
    phase: str


@dataclass(frozen=True)
class Plan:
    """The faults of a run, over all its starts."""

    folder: Path
    faults: tuple[Fault, ...]

    def environment(self) -> dict[str, str]:
        """What ranks are told by."""
        self.folder.mkdir(parents=True, exist_ok=True)
        faults = [asdict(fault) for fault in self.faults]
        return {PLAN: json.dumps({"folder": str(self.folder), "faults": faults})}

    def fired(self) -> list[Fault]:
        """The faults that have happened."""
        return [fault for n, fault in enumerate(self.faults) if (self.folder / str(n)).exists()]

    def check(self) -> None:
        """Fail where a fault that was ordered has not happened."""
        missing = [fault for fault in self.faults if fault not in self.fired()]
        assert not missing, f"these faults have not happened: {missing}"


def train(
    plan: Plan, config: Path, *overrides: str, timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run `roformer train` to its end under a plan; stdout and stderr come together."""
    command = [sys.executable, "-m", "tests.faults", "train", str(config), *overrides]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | plan.environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout_s,
        check=False,
    )


class Injector:
    """Strikes in this rank."""

    def __init__(self, rank: int, folder: Path, faults: list[Fault]) -> None:
        self.step = 0
        self._rank = rank
        self._folder = folder
        self._faults = faults

    def due(self, phase: str, step: int | None = None) -> str | None:
        """The kind of fault that is due here, marked as having happened."""
        step = self.step if step is None else step
        for number, fault in enumerate(self._faults):
            mark = self._folder / str(number)
            here = (fault.rank, fault.step, fault.phase) == (self._rank, step, phase)
            if here and not mark.exists():
                mark.touch()
                return fault.kind
        return None

    def strike(self, phase: str, step: int | None = None) -> str | None:
        """Do what is due here; kinds that need more than this place are returned."""
        kind = self.due(phase, step)
        parent = int(os.environ.get("ROFORMER_PARENT", os.getppid()))
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "hang":
            while True:
                time.sleep(60)
        elif kind == "raise":
            raise RuntimeError("an injected error")
        elif kind == "kill_worker":
            import multiprocessing

            multiprocessing.active_children()[0].kill()
            time.sleep(5)  # torch's SIGCHLD handler raises here
        elif kind in ASKS:
            number = signal.SIGTERM if kind.startswith("term") else signal.SIGUSR1
            targets = {"launcher": os.getppid(), "parent": parent}
            os.kill(targets.get(kind.partition("_")[2], os.getpid()), number)
        elif kind == "fill":
            fill(self._folder / "ballast")
        elif kind == "free":
            (self._folder / "ballast").unlink()
        else:
            return kind
        return None


def install(injector: Injector) -> None:
    """Wrap the places where faults can strike."""
    from trainer import checkpoint, liveness
    from trainer.engine import Engine
    from trainer.loop import Trainer

    liveness.SILENT_S = liveness.STUCK_S = 8.0
    original = {
        name: getattr(owner, name)
        for owner, names in (
            (Trainer, ("train_step", "next_batches", "evaluate")),
            (Engine, ("forward", "backward", "step")),
            (checkpoint, ("begin",)),
            (checkpoint.Save, ("_write", "_complete")),
        )
        for name in names
    }

    def train_step(self: Trainer, *args: Any) -> Any:
        injector.step = self.state.step + 1
        return original["train_step"](self, *args)

    def next_batches(self: Trainer, factors: Any, rows: Iterator[Any]) -> Any:
        if (kind := injector.strike("data")) in LATE_S:
            rows = _late(rows, LATE_S[kind])
        return original["next_batches"](self, factors, rows)

    def evaluate(self: Trainer, *args: Any) -> Any:
        injector.strike("evaluate")
        return original["evaluate"](self, *args)

    def forward(self: Engine, *args: Any) -> Any:
        kind = injector.strike("forward")
        loss = original["forward"](self, *args)
        if kind == "nan_loss":
            loss = type(loss)(loss.total * math.nan, *loss[1:])
        if kind == "nan_gradient":
            loss.total.register_hook(lambda gradient: gradient * math.nan)
        return loss

    def backward(self: Engine, *args: Any) -> None:
        injector.strike("backward")
        original["backward"](self, *args)

    def step(self: Engine, *args: Any, **kwargs: Any) -> float:
        injector.strike("update")
        return original["step"](self, *args, **kwargs)

    def begin(root: Path, engine: Engine, state: Any, **kwargs: Any) -> Any:
        if injector.strike("save", state.step) == "nan_weights":
            parameter = next(engine.module.parameters())  # its fp32 master, not the copy to run
            engine._set_full(parameter, torch.full(parameter.shape, math.nan), None)
        return original["begin"](root, engine, state, **kwargs)

    def write(self: checkpoint.Save) -> None:
        with _full_disk(injector.strike("write", self.step) == "full"):
            original["_write"](self)

    def complete(self: checkpoint.Save, *args: Any) -> Any:
        injector.strike("manifest", self.step)
        return original["_complete"](self, *args)

    Trainer.train_step, Trainer.next_batches, Trainer.evaluate = train_step, next_batches, evaluate
    Engine.forward, Engine.backward, Engine.step = forward, backward, step
    checkpoint.begin, checkpoint.Save._write = begin, write
    checkpoint.Save._complete = complete


def _late(rows: Iterator[Any], seconds: float) -> Iterator[Any]:
    """Rows that come after a while."""
    time.sleep(seconds)
    # `yield from` would close them with this generator, after one step
    for row in rows:  # noqa: UP028
        yield row


@contextmanager
def _full_disk(is_full: bool) -> Iterator[None]:
    """Let the system refuse this process files of more than a kilobyte."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def main() -> int:
    """Be `roformer`, or a rank of it."""
    if "ROFORMER_PARENT" in os.environ or "RANK" in os.environ:
        from launch.train import main as rank_main

        plan = json.loads(os.environ[PLAN])
        faults = [Fault(**fault) for fault in plan["faults"]]
        injector = Injector(int(os.environ.get("RANK", 0)), Path(plan["folder"]), faults)
        install(injector)
        injector.strike("start", 0)
        return rank_main()
    from launch import cli, spawn
    from trainer import liveness

    liveness.SILENT_S = 8.0
    command_of: Callable[..., list[str]] = spawn.rank_command

    def rank_command(*args: Any, **kwargs: Any) -> list[str]:
        command = command_of(*args, **kwargs)
        return ["tests.faults" if part == "launch.train" else part for part in command]

    spawn.rank_command = rank_command
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
