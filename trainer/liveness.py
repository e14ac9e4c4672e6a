"""Signs of life of all ranks, and what killed the first that failed: a job never hangs unnamed.

    runs/NAME/ranks/00001.json          rank 1's pulse: host, process, what it does; every 2 s
    runs/NAME/ranks/00001.failed.json   how it failed: cause and traceback

A thread of each rank writes its pulse. It also looks at two others' health: that of its own main
thread, which may be stuck, and that of the next rank (the last one's is the first), whose pulse
stops when its process is stopped or its machine is gone. Either way it writes down who failed, and
ends its own process; its launcher, or the ends of their connections, end the rest. Where all ranks
of a machine are frozen, or the only one, `roformer train` sees it (`Onlooker`).
"""

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:  # importing torch takes seconds
    from trainer.distributed import World

BEAT_S, SILENT_S = 2.0, 30.0
STUCK_S, STUCK_FACTOR = 30.0, 20.0
USUAL_LOAD = 2.0  # processes a core that want to run
STARTING, WAITING = "starting", "waiting for data"
COLLECTIVES = "distributed_c10d.py"
"""File of torch whose frames are innermost where a thread waits for other ranks."""


@dataclass(frozen=True)
class Failure:
    """How a rank failed."""

    rank: int
    host: str
    time: float
    """Unix seconds."""
    cause: str
    traceback: str = ""
    is_consequence: bool = False
    """Whether another rank's end caused it."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}: {self.cause}"


class Liveness:
    """This rank's pulse, and its look at the others'; see the module."""

    def __init__(
        self,
        folder: Path,
        world: "World",
        *,
        timeout_s: float,
        last_words: Callable[[], None] = lambda: None,
    ) -> None:
        """Make it for a run's folder of ranks; what an earlier start left of this rank goes.

        Args:
            folder: Where the pulses are.
            world: This rank among all.
            timeout_s: Longest time without a sign of life where none is known to be too long.
            last_words: Called before it ends its process.
        """
        self._folder = folder
        self._world = world
        self._timeout_s = timeout_s
        self._last_words = last_words
        self._phase, self._since = STARTING, time.monotonic()
        self._longest: dict[str, float] = {}
        self._main = threading.main_thread().ident
        self._ended = threading.Event()
        self._sees_others = False
        folder.mkdir(parents=True, exist_ok=True)
        _failed(folder, world.rank).unlink(missing_ok=True)

    def pulse(self, phase: str) -> None:
        """Say that the main thread is well, and what it does next."""
        now = time.monotonic()
        gap = now - self._since
        self._longest[self._phase] = max(gap, self._longest.get(self._phase, 0.0))
        self._phase, self._since = phase, now

    def see_others(self) -> None:
        """Note that all ranks have started: the next one's pulse is of this start."""
        self._sees_others = True

    def __enter__(self) -> Self:
        self._beat(0)
        threading.Thread(target=self._watch, name="liveness", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with suppress(OSError):
            _pulse(self._folder, self._world.rank).unlink(missing_ok=True)

    def _watch(self) -> None:
        file = _pulse(self._folder, (self._world.rank + 1) % self._world.size)
        started = time.monotonic()
        seen, seen_at, beats, number = "", started, 0, 0
        is_told = False
        while not self._ended.wait(BEAT_S):
            try:
                self._beat(number := number + 1)
            except OSError:  # a full disk
                with suppress(OSError):
                    os.utime(_pulse(self._folder, self._world.rank))
            self._look_at_main()
            if not is_told and time.monotonic() - started > SILENT_S and (who := self._absent()):
                is_told = True
                print(f"roformer: waiting for {who}", file=sys.stderr, flush=True)
            if self._world.size > 1:
                beat = _beat_of(file)
                now = time.monotonic()
                if beat != seen or not beat:
                    seen, seen_at, beats = beat, now, beats + 1
                elif beats < 2 and not self._sees_others:
                    continue  # an earlier start's: this one's has not come yet
                elif now - seen_at > SILENT_S or (
                    now - seen_at > BEAT_S and _was_killed(self._folder, _last(beat))
                ):
                    self._end_for(_last(beat), now - seen_at)

    def _beat(self, number: int) -> None:
        data = {
            "rank": self._world.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "phase": self._phase,
            "beat": number,
        }
        _write(_pulse(self._folder, self._world.rank), data)

    def _look_at_main(self) -> None:
        phase, silent_s = self._phase, time.monotonic() - self._since
        longest = self._longest.get(phase)
        limit_s = self._timeout_s
        if longest is not None and phase not in (STARTING, WAITING):
            limit_s = min(limit_s, max(STUCK_S, STUCK_FACTOR * longest) * _overload())
        if silent_s < limit_s:
            return
        frame = sys._current_frames().get(self._main or 0)
        if frame is None or (_waits_for_others(frame) and silent_s < self._timeout_s):
            return
        stack = "".join(traceback.format_stack(frame))
        cause = f"no progress for {silent_s:.0f} s while {phase}"
        if who := self._absent():
            stack, cause = "", f"{cause}: {who}"
        tell(self._folder, self._world.rank, cause, stack, is_consequence=_waits_for_others(frame))
        print(f"roformer: rank {self._world.rank}: {cause}\n{stack}", file=sys.stderr, flush=True)
        self._last_words()
        os._exit(1)

    def _absent(self) -> str:
        """Name the ranks that have not come to this start; empty where all have met."""
        if self._sees_others:
            return ""
        oldest = time.time() - SILENT_S  # an earlier start's pulse is older
        absent = [
            str(rank)
            for rank in range(self._world.size)
            if rank != self._world.rank and _modified(_pulse(self._folder, rank)) < oldest
        ]
        named = ", ".join(absent[:8]) + f" and {len(absent) - 8} more" * (len(absent) > 8)
        return f"rank{'s' * (len(absent) > 1)} {named}, not started" if absent else ""

    def _end_for(self, beat: dict[str, Any], silent_s: float) -> None:
        is_killed = _was_killed(self._folder, beat)
        cause = _killed(beat) if is_killed else _silent(beat, silent_s)
        rank = beat["rank"]
        tell(self._folder, rank, cause, host=beat["host"])
        print(f"roformer: rank {rank} on {beat['host']}: {cause}", file=sys.stderr, flush=True)
        if beat["host"] == socket.gethostname():
            with suppress(ProcessLookupError):
                os.kill(beat["pid"], signal.SIGKILL)
        self._last_words()
        os._exit(1)


class Onlooker:
    """Sees from outside, call by call, which ranks of this machine are frozen."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[Path, tuple[str, float]] = {}
        self._looked_at = time.monotonic()

    def look(self) -> None:
        """Write down that a rank has failed, once its pulse has stood still for too long."""
        now = time.monotonic()
        passed_s = min(now - self._looked_at, BEAT_S)  # we may have been frozen as well
        self._looked_at = now
        for file in self._folder.glob("*[0-9].json"):
            beat = _beat_of(file)
            before, silent_s = self._seen.get(file, ("", 0.0))
            silent_s = silent_s + passed_s if beat == before else 0.0
            self._seen[file] = beat, silent_s
            if silent_s > SILENT_S + 2 * BEAT_S:  # the next rank sees it first, if it can
                last = _last(beat)
                if last["host"] == socket.gethostname():
                    tell(self._folder, last["rank"], _silent(last, silent_s))


def tell(
    folder: Path,
    rank: int,
    cause: str,
    trace: str = "",
    *,
    host: str | None = None,
    is_consequence: bool = False,
) -> None:
    """Write down how a rank failed; what was written first stays."""
    failure = Failure(rank, host or socket.gethostname(), time.time(), cause, trace, is_consequence)
    file = _failed(folder, rank)
    if not file.exists():
        with suppress(OSError):
            _write(file, asdict(failure))


def tell_of_error(folder: Path, rank: int, error: BaseException) -> None:
    """Write down the exception that ends a rank."""
    lines = "".join(traceback.format_exception(error))
    text = " ".join(str(error).split())
    in_collective = any(
        COLLECTIVES in frame.filename for frame in traceback.extract_tb(error.__traceback__)
    )
    cause = f"{type(error).__name__}: {text}" if text else type(error).__name__
    tell(folder, rank, cause, lines, is_consequence=in_collective)


def first_failure(folder: Path) -> Failure | None:
    """Return the failure that the others follow from, of those written down or seen here.

    A rank of this machine whose process is gone and that said nothing was killed.
    """
    told = [Failure(**data) for data in _all(folder, "*.failed.json")]
    causes = [failure for failure in told if not failure.is_consequence]
    silent = [*killed_ranks(folder)]
    return min(causes or silent or told, key=lambda failure: failure.time, default=None)


def killed_ranks(folder: Path) -> Iterator[Failure]:
    """Yield the ranks of this machine whose process is gone, and that didn't say why."""
    for beat in _all(folder, "*[0-9].json"):
        if _was_killed(folder, beat):
            with suppress(FileNotFoundError):
                last_beat = _pulse(folder, beat["rank"]).stat().st_mtime
                yield Failure(beat["rank"], beat["host"], last_beat, _killed(beat))


def _was_killed(folder: Path, beat: dict[str, Any]) -> bool:
    """Whether a process of this machine is gone, and neither ended well nor said why."""
    is_here = beat["host"] == socket.gethostname()
    is_told = _failed(folder, beat["rank"]).exists()
    is_gone = is_here and not is_told and _state(beat) in ("", "Z")
    return is_gone and _pulse(folder, beat["rank"]).exists()


def _killed(beat: dict[str, Any]) -> str:
    return (
        f"process {beat['pid']} was killed, last seen {beat['phase']}: by SIGKILL, perhaps the "
        "kernel's for want of memory"
    )


def _silent(beat: dict[str, Any], silent_s: float) -> str:
    return (
        f"process {beat['pid']} has not answered for {silent_s:.0f} s, last seen {beat['phase']}: "
        f"{_state_of(beat)}"
    )


def has_failures(folder: Path) -> bool:
    """Whether some rank has failed, or was killed on this machine."""
    return any(folder.glob("*.failed.json")) or any(True for _ in killed_ranks(folder))


def clear(folder: Path) -> None:
    """Forget all ranks of an earlier start."""
    for file in folder.glob("*.json"):
        file.unlink(missing_ok=True)


def _overload() -> float:
    """How much longer things may take here, where this machine has too much to run; at least 1."""
    return max(1.0, os.getloadavg()[0] / (USUAL_LOAD * (os.cpu_count() or 1)))


def _waits_for_others(frame: FrameType | None) -> bool:
    """Whether a thread stands in a call of torch.distributed."""
    for _ in range(8):
        if frame is None:
            break
        if frame.f_code.co_filename.endswith(COLLECTIVES):
            return True
        frame = frame.f_back
    return False


def _pulse(folder: Path, rank: int) -> Path:
    return folder / f"{rank:05d}.json"


def _failed(folder: Path, rank: int) -> Path:
    return folder / f"{rank:05d}.failed.json"


def _write(file: Path, data: dict[str, Any]) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(data), encoding="utf-8")
    temporary.replace(file)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""


def _beat_of(file: Path) -> str:
    """Return what changes with every beat, in the last line: `_last` reads the rest."""
    text = _read(file)
    try:
        return text and f"{text}\n{file.stat().st_mtime_ns}"
    except OSError:  # it has just gone
        return ""


def _last(beat: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(beat.splitlines()[0])
    return data


def _all(folder: Path, pattern: str) -> Iterator[dict[str, Any]]:
    for file in sorted(folder.glob(pattern)):
        with suppress(ValueError):  # it has gone meanwhile
            yield json.loads(_read(file))


def _modified(file: Path) -> float:
    """Unix time of a file's last change; 0 where there is none."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _state(beat: dict[str, Any]) -> str:
    """State letter of a process of this machine, as `ps` has it; "" when it is gone."""
    status = _read(Path(f"/proc/{beat['pid']}/stat"))
    return status.rpartition(")")[2].split()[0] if status else ""


def _state_of(beat: dict[str, Any]) -> str:
    if beat["host"] != socket.gethostname():
        return "its machine is gone, or the process is stopped"
    names = {"": "the process is gone", "T": "it is stopped (SIGSTOP)", "D": "it waits for a disk"}
    return names.get(_state(beat), f"the process is in state {_state(beat)}")
