"""Killed inside saves, again and again: each start goes on from a complete checkpoint.

    python -m tests.kills [--kills 100] [--seed 1]      two ranks that do nothing but save
    python -m tests.kills --engine                      the same, with DeepSpeed's state (ZeRO-2)
    python -m tests.kills --launcher [--kills 10]       `roformer train` on two ranks

Kills come in two ways. `time`: all processes at once, at a moment drawn uniformly from how long a
save takes, from its beginning to its manifest and the removal of older ones. `call`: one rank, just
before the n-th call by which it changes or opens a file, or before or after it syncs one, for every
n in turn; the other then loses its peer. After each kill, what the product would go on from is read
in full: its sha256, its step (at most one interval before that of the save which was struck), and
its tensors, which are those of that step and no other.
"""

import argparse
import collections
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from rich.console import Console
from rich.table import Table

from tests.faults import ROOT
from trainer import checkpoint
from trainer.config import CheckpointConfig
from trainer.distributed import World, gather_from_ranks
from trainer.saving import Saver
from trainer.state import TrainState

WORLD, INTERVAL, KEEP = 2, 3, 2
SAVES = 4
"""Of a life that nobody ends."""


@dataclass
class Tensors:
    """Stands in for an engine: tensors that tell the step they are of."""

    step: int
    optimizer_steps: int = 0
    loss_scale: tuple[()] = ()

    def gather_state(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        for number in range(4):
            value = torch.full((500_000,), float(self.step + number))
            yield f"p{number}", {"value": value}

    @staticmethod
    def meet(world: World, file: Path) -> None:
        dist.init_process_group("gloo", f"file://{file}", rank=world.rank, world_size=world.size)

    def train(self) -> None:
        self.step += 1
        time.sleep(0.002)

    @classmethod
    def begin(cls, saved: checkpoint.Checkpoint | None) -> "Tensors":
        return cls(saved.state.step if saved else 0)

    @staticmethod
    def problem(saved: checkpoint.Checkpoint) -> str | None:
        for name, tensor in saved.weights.items():
            expected = float(saved.state.step + int(name[1:]))
            if not bool((tensor == expected).all()):
                return f"{name} of {saved.folder} is not of its step"
        return None


class Ours:
    """A real engine, and the loss of each step, which must be that of a life without kills."""

    curve: dict[int, float] = {}  # noqa: RUF012  of the first life

    def __init__(self, saved: checkpoint.Checkpoint | None) -> None:
        from tests.integration import test_exactness

        weights = {n: dict(k) for n, k in saved.tensors.items()} if saved else None
        self.engine = test_exactness.build_engine(2, weights=weights)
        if saved:
            self.engine.restore_state(saved.tensors, saved.optimizer_steps)
        self.step = saved.state.step if saved else 0

    @staticmethod
    def meet(world: World, file: Path) -> None:
        from trainer.engine import init_distributed

        place = {"RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_RANK": world.rank}
        port = 20_000 + zlib.crc32(bytes(file)) % 10_000
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        init_distributed(world, timeout_s=60)

    begin = classmethod(lambda cls, saved: cls(saved))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def train(self) -> float:
        from tests.integration import test_exactness

        (loss, _), *_ = test_exactness.train(self.engine, 1, range(self.step, self.step + 1))
        self.step += 1
        return loss

    @staticmethod
    def problem(saved: checkpoint.Checkpoint) -> str | None:
        steps = saved.optimizer_steps
        return None if steps == saved.state.step else f"{steps} updates in step {saved.state.step}"


def live(
    kind: type[Tensors] | type[Ours],
    root: Path,
    meeting: Path,
    rank: int,
    sender: Connection,
    die_before: int | None,
) -> None:
    """Be a rank: go on from what is there, then train and save until killed or done.

    Tells `sender` of each save: ("begin", step, seconds), ("end", step, seconds, calls so far), of
    each step with its loss, and of an error, which the loss of the other rank is.
    """
    try:
        live_well(kind, root, meeting, rank, sender, die_before)
    except Exception as error:
        sender.send(("error", 0, f"{type(error).__name__}: {error}"))


def live_well(
    kind: type[Tensors] | type[Ours],
    root: Path,
    meeting: Path,
    rank: int,
    sender: Connection,
    die_before: int | None,
) -> None:
    torch.set_num_threads(1)
    world = World(rank, WORLD, rank, WORLD)
    kind.meet(world, meeting)
    found = checkpoint.find(root, "auto")
    dist.barrier()  # before the first of us removes anything
    saved = checkpoint.load(found) if found else None
    mine: Any = kind.begin(saved)
    state = saved.state if saved else TrainState()
    calls = Calls(die_before)
    finish = checkpoint.Save.finish

    def tell_of_end(self: checkpoint.Save, **kept: int) -> None:
        finish(self, **kept)
        calls.armed = False
        sender.send(("end", self.step, time.monotonic(), calls.number))

    checkpoint.Save.finish = tell_of_end  # type: ignore[method-assign]
    settings = CheckpointConfig(every_steps=INTERVAL, keep=KEEP)
    saver = Saver(
        root, mine, world, settings, order="", saved_step=state.step, pulse=lambda phase: None
    )
    last = state.step + SAVES * INTERVAL
    while state.step < last:
        sender.send(("step", state.step + 1, mine.train()))
        state.step += 1
        if sum(gather_from_ranks(saver.is_written)) == WORLD:
            saver.complete()
        if saver.is_due(state.step):
            saver.complete()
            sender.send(("begin", state.step, time.monotonic()))
            calls.armed = True
            saver.begin(state)
    saver.complete()
    sender.send(("done", state.step))


class Calls:
    """Counts what this process asks of its files, and kills it before a chosen one."""

    def __init__(self, die_before: int | None) -> None:
        self.number, self.armed = 0, False
        self._die_before = die_before
        sys.addaudithook(lambda event, _: self.count() if is_of_files(event) else None)
        for owner, name in ((os, "fsync"), (checkpoint, "save_file")):
            setattr(owner, name, self._around(getattr(owner, name)))

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count()
            result = function(*args, **kwargs)
            self.count()
            return result

        return counted

    def count(self) -> None:
        if self.armed:
            self.number += 1
            if self.number == self._die_before:
                os.kill(os.getpid(), signal.SIGKILL)


def is_of_files(event: str) -> bool:
    return event == "open" or event.startswith(("os.", "shutil."))


class Kills:
    """Lives of one run, and what was found after each."""

    def __init__(self, kind: type[Tensors] | type[Ours], folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.happened: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.lost: dict[str, list[int]] = collections.defaultdict(list)
        self._kind = kind
        self._folder = folder
        self._root = folder / "checkpoints"
        self._lives = 0
        self._known: dict[int, float] = {}
        told = self._live(None, None, 0)  # from the beginning to the end: how long, how many calls
        begins = [m for m in told if m[0] == "begin"]
        ends = [m for m in told if m[0] == "end"]
        assert told[-1][0] == "done", told[-1]
        self.save_s = max(e[2] - b[2] for b, e in zip(begins, ends, strict=True))
        self.calls = max(m[3] for m in ends)

    def strike(self, how: str, number: int) -> None:
        """Let the ranks live once more, and kill them."""
        rank = number % WORLD
        before = newest(self._root)
        if how == "call":
            told = self._live(rank, 1 + number // WORLD % self.calls, None)
        else:
            told = self._live(None, None, self.rng.uniform(0, 1.1 * self.save_s))
        if told[-1][0] == "done":
            return  # it has fewer calls than the other rank
        self.happened[how] += 1
        struck = max((m[1] for m in told if m[0] == "begin"), default=before)
        problems = [*self._problems(struck, before)]
        self.lost[how].append(struck - newest(self._root))
        self.wrong += [f"{how} {number}: {problem}" for problem in problems]

    def _problems(self, struck: int, before: int) -> Iterator[str]:
        for folder in checkpoint.complete(self._root):
            if (problem := checkpoint.damage(folder)) is not None:
                yield f"it has a manifest, and {problem}"
        found = checkpoint.find(self._root, "auto")
        step = checkpoint.step_of(found) if found else 0
        if not before <= step:
            yield f"step {before} was there before, and now it is {step}"
        if struck - step > INTERVAL:
            yield f"struck in the save of step {struck}, and goes on from {step}"
        if found is not None:
            if (problem := self._kind.problem(checkpoint.load(found))) is not None:
                yield problem
        folders = [path for path in self._root.iterdir() if path.is_dir()]
        if len(folders) > KEEP + 2:  # one that was being written, one that was being removed
            yield f"{len(folders)} folders are left: {sorted(f.name for f in folders)}"

    def _live(self, rank: int | None, call: int | None, delay_s: float | None) -> list[tuple]:
        """Fork the ranks; return what was told, in order, by whichever tells of more."""
        self._lives += 1
        meeting = self._folder / f"meeting-{self._lives}"
        context = multiprocessing.get_context("fork")
        pipes, processes = [], []
        for number in range(WORLD):
            receiver, sender = context.Pipe(duplex=False)
            dies = call if number == rank else None
            process = context.Process(
                target=live, args=(self._kind, self._root, meeting, number, sender, dies)
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        told: list[list[tuple]] = [[] for _ in pipes]
        open_pipes = dict(zip(pipes, told, strict=True))
        kill_at = None
        begun = self.rng.randint(1, SAVES) if delay_s else 0
        while open_pipes:
            patience = None if kill_at is None else max(0.0, kill_at - time.monotonic())
            for pipe in (ready := wait(list(open_pipes), patience)):
                try:
                    message = pipe.recv()
                except EOFError:
                    del open_pipes[pipe]
                    if call is not None:
                        kill(processes)  # as launchers do once a rank has died
                    continue
                open_pipes[pipe].append(message)
                is_first = pipe is pipes[0] and message[0] == "begin"
                begun -= is_first
                if is_first and begun == 0 and delay_s:
                    kill_at = message[2] + delay_s
            if kill_at is not None and not ready and time.monotonic() >= kill_at:
                kill(processes)
                kill_at = None
        for process in processes:
            process.join()
        self.wrong += [
            f"life {self._lives}: {message[2]}"
            for messages in told
            for message in messages
            if message[0] == "error" and call is None and delay_s is None
        ]
        longest = max(told, key=lambda messages: [m[1] for m in messages[-1:]])
        for message in longest:
            if message[0] == "step" and message[2] is not None:
                known = self._known.setdefault(message[1], message[2])
                if known != message[2]:
                    self.wrong.append(f"loss {message[2]} in step {message[1]}, was {known}")
        return longest


def kill(processes: list[Any]) -> None:
    for process in processes:
        process.kill()


def newest(root: Path) -> int:
    """Step of the newest complete checkpoint; 0 without one."""
    found = checkpoint.complete(root)
    return checkpoint.step_of(found[0]) if found else 0


def strike_launched(kills: int, seed: int) -> tuple[list[int], list[str]]:
    """Kill all processes of `roformer train` inside saves; return the steps lost, and problems."""
    from tests.chaos import words, write_project

    rng, lost, problems = random.Random(seed), [], []
    with tempfile.TemporaryDirectory() as name:
        config = write_project(Path(name))
        settings = yaml.safe_load(config.read_text())
        settings["model"] |= {"hidden_size": 256, "intermediate_size": 1024}
        settings["curriculum"]["stages"] = [
            {"name": "a", "seq_len": 32, "global_batch": 8, "steps": 10_000}
        ]
        settings["checkpoint"] = {"every_steps": INTERVAL, "keep": KEEP}
        config.write_text(yaml.safe_dump(settings))
        root = Path(name) / "runs" / "tiny" / "checkpoints"
        command = [sys.executable, "-m", "launch.cli", "train", str(config)]
        for number in range(kills):
            before = newest(root)
            process = subprocess.Popen(
                [*command, "launch.num_processes=2"],
                cwd=ROOT,
                env=os.environ | {"ROFORMER_TEST_KILLS": name},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            saves = rng.randint(1, 3)
            target = before + saves * INTERVAL
            folder = root / f"step-{target:08d}"
            while not folder.exists() and process.poll() is None:
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.15))
            told = process.poll()
            for other in Path("/proc").glob("[0-9]*"):
                if f"ROFORMER_TEST_KILLS={name}" in words(other):
                    os.kill(int(other.name), signal.SIGKILL)
            process.wait()
            found = checkpoint.find(root, "auto")
            step = checkpoint.step_of(found) if found else 0
            was = "complete" if (folder / checkpoint.MANIFEST).exists() else "half-written"
            print(f"kill {number + 1}: step {target} {was}, goes on from {step}", flush=True)
            lost.append(target - min(step, target))
            if told is not None:
                problems.append(f"kill {number + 1}: it had ended with {told}")
            if target - step > INTERVAL or step < before:
                problems.append(f"kill {number + 1}: struck at {target}, goes on from {step}")
    return lost, problems


def main() -> int:
    """Kill; print the table; return 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--launcher", action="store_true")
    arguments = parser.parse_args()
    table = Table("kills", "how many", "went on from a complete one", "steps lost, most")
    if arguments.launcher:
        lost, wrong = strike_launched(arguments.kills or 10, arguments.seed)
        table.add_row("roformer train", str(len(lost)), str(len(lost) - len(wrong)), str(max(lost)))
    else:
        kind = Tensors
        if arguments.engine:
            import trainer.engine  # noqa: F401  before the ranks are forked

            kind = Ours
        with tempfile.TemporaryDirectory() as folder:
            run = Kills(kind, Path(folder), arguments.seed)
            print(f"a save: {1e3 * run.save_s:.0f} ms, {run.calls} calls in {SAVES}")
            number = 0
            while sum(run.happened.values()) < (arguments.kills or 100):
                run.strike(("time", "call")[number % 2], number // 2)
                number += 1
        wrong = run.wrong
        for how, count in run.happened.items():
            bad = len({w.partition(":")[0] for w in wrong if w.startswith(how)})
            table.add_row(how, str(count), str(count - bad), str(max(run.lost[how])))
    Console(width=90).print(table)
    for problem in wrong:
        print(f"WRONG: {problem}")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
