"""Random faults, run after run, for as long as is wanted: `make chaos`.

    python -m tests.chaos [--faults 200] [--seed 1] [--minutes 600]

A run is started again and again, each time on another world, ZeRO stage and number of loader
processes, and with another fault, until it is finished; then comes the next run. After every start
the ledger is checked: the hash of every global batch, and the loss to 1e-5 (until a step has been
skipped), are those of a run without faults; a checkpoint is there that lost no more than an
interval; no process is left. Between starts, files of the newest checkpoint are damaged at times.
"""

import argparse
import collections
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from data_pipeline.config import TokenizerConfig
from data_pipeline.shards import write_shards
from data_pipeline.tokenizers import load_tokenizer
from tests.conftest import TINY, make_documents
from tests.faults import ASKS, ENDS, Fault, Plan, train
from tests.integration.processes import read_records, roformer
from trainer.checkpoint import MANIFEST, complete, step_of

TOTAL, INTERVAL = 12, 2
PHASES = {
    "kill_worker": ("data",),
    "nan_loss": ("forward",),
    "nan_gradient": ("forward",),
    "full": ("write",),
}
ANYWHERE = ("data", "forward", "backward", "update", "evaluate", "save", "write", "manifest")
KINDS = (*ENDS, *ASKS, "nan_loss", "nan_gradient", "full")
DAMAGES = ("flip", "cut", "remove")


def main() -> int:
    """Strike; print the table; return 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--minutes", type=float, default=600)
    arguments = parser.parse_args()
    print(f"chaos: seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        chaos = Chaos(Path(folder), random.Random(arguments.seed))
        end = time.monotonic() + 60 * arguments.minutes
        while sum(chaos.fired.values()) < arguments.faults and time.monotonic() < end:
            chaos.live(end)
    chaos.show()
    return 1 if chaos.wrong else 0


class Chaos:
    """Runs, their faults, and what came of them."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.fired: collections.Counter[str] = collections.Counter()
        self.wrong: collections.Counter[str] = collections.Counter()
        self.seconds: collections.Counter[str] = collections.Counter()
        self._folder = folder
        self._rng = rng
        self._lives = 0
        self._config = write_project(folder)
        done = roformer("train", self._config, "run.name=reference")
        assert done.returncode == 0, done.stdout
        self._reference = {r["step"]: r for r in read_records(folder / "runs" / "reference")}

    def live(self, end: float) -> None:
        """Start one run until it is finished."""
        self._lives += 1
        name = f"run{self._lives}"
        run, skipped = self._folder / "runs" / name, False
        for number in range(30):
            if time.monotonic() > end:
                return
            damage = self._damage(run) if self._rng.random() < 0.15 else None
            fault, overrides = self._draw(run)
            plan = Plan(self._folder / "marks" / f"{name}-{number}", (fault,))
            before = newest(run, 2 if damage else 1)
            began = time.monotonic()
            try:
                done = train(plan, self._config, f"run.name={name}", *overrides)
            except subprocess.TimeoutExpired as hung:
                end_all(plan)
                text = (hung.stdout or b"").decode(errors="replace")
                done = subprocess.CompletedProcess(hung.cmd, -1, f"{text}\nhangs: ended")
            took = time.monotonic() - began
            has_fired = bool(plan.fired())
            skipped |= has_fired and fault.kind.startswith("nan")
            problems = self._look(run, plan, done, before, skipped)
            if damage and "damaged checkpoint passed over" not in done.stdout:
                problems.append(f"nothing was said about the damage ({damage})")
            for kind in ([fault.kind] if has_fired else []) + ([damage] if damage else []):
                self.fired[kind] += 1
                self.seconds[kind] += round(took)
                self.wrong[kind] += bool(problems)
            self.wrong[fault.kind] += bool(problems) and not has_fired
            what = f"{fault} {' '.join(overrides)} {damage or ''}"
            print(f"{name}.{number} exit {done.returncode} {took:.0f} s {what}", flush=True)
            for problem in problems:
                print(f"    WRONG: {problem}\n{done.stdout}", flush=True)
            if done.returncode == 0:
                return

    def _draw(self, run: Path) -> tuple[Fault, list[str]]:
        rng, kind = self._rng, self._rng.choice(KINDS)
        world, workers = rng.choice((1, 2, 2)), rng.choice((0, 1, 2))
        workers = max(workers, 1) if kind == "kill_worker" else workers
        phase = rng.choice(PHASES.get(kind, ANYWHERE))
        step = newest(run) + rng.choice((1, 2, 3, 4))
        if phase in ("save", "write", "manifest"):
            step = -(-step // INTERVAL) * INTERVAL
        if phase == "evaluate":
            step = next((s for s in (5, 9, 12) if s >= step), 12)
        rank = 0 if phase == "manifest" else rng.randrange(world)
        stage = rng.choice((0, 1, 2, 3))
        overrides = [f"launch.num_processes={world}", f"data.workers={workers}"]
        overrides.append(f"engine.zero_stage={stage}")
        return Fault(kind, rank, min(step, TOTAL), phase), overrides

    def _look(self, run: Path, plan: Plan, done, before: int, skipped: bool) -> list[str]:
        (fault,) = plan.faults
        problems = []
        wanted = {0}
        if plan.fired():
            wanted = {1} if fault.kind in ENDS or fault.kind == "full" else {0}
            wanted = {75, 0} if fault.kind in ASKS else wanted
        if done.returncode not in wanted:
            problems.append(f"exit {done.returncode} and not {wanted}")
        if (
            done.returncode == 1
            and fault.kind in ENDS
            and f"rank {fault.rank} on " not in (done.stdout.splitlines()[-1])
        ):
            problems.append(f"does not name rank {fault.rank}")
        records = records_of(run)
        for step, record in records.items():
            want = self._reference[step]
            if record["data/hash"] != want["data/hash"]:
                problems.append(f"other data in step {step}")
            loss = record["train/loss"]
            if not skipped and (loss is None or abs(loss - want["train/loss"]) > 1e-5):
                problems.append(f"loss {loss} in step {step}, and not {want['train/loss']}")
        if newest(run) < before:
            problems.append(f"the checkpoint of step {before} is lost")
        if records and newest(run) < max(records) - 2 * INTERVAL:
            problems.append(f"{max(records)} steps made, and the last checkpoint is {newest(run)}")
        if done.returncode == 0 and sorted(records) != list(range(1, TOTAL + 1)):
            problems.append(f"finished with the steps {sorted(records)}")
        if left := processes_of(plan):
            problems.append(f"processes are left: {left}")
        return problems

    def _damage(self, run: Path) -> str | None:
        found = complete(run / "checkpoints")
        if len(found) < 2:
            return None
        kind = self._rng.choice(DAMAGES)
        names = sorted(path for path in found[0].iterdir() if path.name != MANIFEST)
        file = self._rng.choice(names)
        content = bytearray(file.read_bytes())
        if kind == "remove":
            file.unlink()
        elif kind == "cut":
            file.write_bytes(content[: self._rng.randrange(len(content))])
        else:
            content[self._rng.randrange(len(content))] ^= 1 << self._rng.randrange(8)
            file.write_bytes(content)
        return kind

    def show(self) -> None:
        """Print the table of results."""
        table = Table("fault", "happened", "survived", "seconds a start", title="chaos")
        for kind, count in sorted(self.fired.items()):
            mean = self.seconds[kind] / count
            table.add_row(kind, str(count), str(count - self.wrong[kind]), f"{mean:.0f}")
        total, wrong = sum(self.fired.values()), sum(self.wrong.values())
        table.add_row("all", str(total), str(total - wrong), "", end_section=True)
        Console(width=80).print(table)


def newest(run: Path, place: int = 1) -> int:
    """Step of the newest complete checkpoint, or of the one in another place; 0 without one."""
    found = complete(run / "checkpoints")
    return step_of(found[place - 1]) if len(found) >= place else 0


def records_of(run: Path) -> dict[int, dict]:
    """The last record of each step."""
    file = run / "metrics.jsonl"
    return {r["step"]: r for r in read_records(run)} if file.exists() else {}


def words(process: Path) -> str:
    """A living process's environment; "" where it is dead or not ours."""
    try:
        if (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return ""
        return (process / "environ").read_text(errors="replace")
    except OSError:
        return ""


def processes_of(plan: Plan) -> list[Path]:
    """The living processes of a start."""
    return [p for p in Path("/proc").glob("[0-9]*") if str(plan.folder) in words(p)]


def end_all(plan: Plan) -> None:
    """End a start that hangs."""
    for process in processes_of(plan):
        os.kill(int(process.name), signal.SIGKILL)


def write_project(folder: Path) -> Path:
    """Write shards and the config of every run."""
    tokenizer = load_tokenizer(TokenizerConfig(kind="bytes"))
    for name, count, shards in (("train", 60, 8), ("eval", 7, 1)):
        write_shards(
            make_documents(count, seed=len(name)),
            tokenizer,
            folder / name,
            seed=1,
            min_shards=shards,
            shard_mib=64,
            workers=1,
        )
    config = json.loads(json.dumps(TINY)) | {
        "run": {**TINY["run"], "dir": str(folder / "runs")},
        "data": {"train": str(folder / "train"), "eval": str(folder / "eval"), "lanes": 8},
        "checkpoint": {"every_steps": INTERVAL, "keep": 3},
        "engine": {**TINY["engine"], "timeout_s": 120},  # ends one that hangs at its start
    }
    file = folder / "chaos.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
