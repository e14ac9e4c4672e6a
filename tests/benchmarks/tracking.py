"""What MLflow costs a step, whatever its server does, and how long a run's end waits for it.

    python -m tests.benchmarks.tracking [--servers refused slow ...] [--steps 20] [--turns 6]
        [--threads 1] [--json results.json]

Steps of 4x256 on 2,048 tokens, recorded one by one. They take turns: the child process that tells
MLflow runs, or is stopped (SIGSTOP) and costs nothing. The servers: `file`, an SQLite store beside
the run; `server`, a real one; `slow`, the same behind a proxy that takes 200 ms for every answer;
`refused`, a port where nobody listens; `dies`, killed at step 5; `silent`, accepts and never
answers; `full`, its disk is. At the end `report`'s delivery brings the rest to a healthy server
where there is one, and the points that arrived are counted: each step once, or it fails.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import requests

from tests.benchmarks.subjects import (
    model_config,
    our_trainer,
    packed_rows,
    train_step,
    vocabulary,
)
from tests.benchmarks.timing import (
    Stopwatch,
    Time,
    alternate,
    print_rows,
    print_table,
    ratio,
    set_threads,
    wall,
    write_json,
)
from tests.disks import fill, mount, unmount
from trainer.config import MlflowConfig
from trainer.distributed import free_port
from trainer.tracking import State, Tracker, sync

SERVERS = ("file", "server", "slow", "refused", "dies", "silent", "full")
ROWS, SEQ_LEN = 4, 512
COLUMNS = ("server", "step, tracked over not", "end, seconds", "told at the end", "points after")


class Server:
    """A real MLflow server on a store, which can be killed and started again."""

    def __init__(self, store: Path) -> None:
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._store = store
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        program = str(Path(sys.executable).parent / "mlflow")
        options = ["--backend-store-uri", f"sqlite:///{self._store}/mlflow.db"]
        options += ["--artifacts-destination", str(self._store)]
        options += ["--workers", "1", "--port", str(self.port)]
        self._process = subprocess.Popen(
            [program, "server", *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            start_new_session=True,
        )
        end = time.monotonic() + 120
        while time.monotonic() < end:
            try:
                if requests.get(f"{self.uri}/health", timeout=1).ok:
                    return
            except requests.RequestException:
                time.sleep(0.2)
        raise TimeoutError("MLflow's server does not come up")

    def kill(self) -> None:
        """End it and its workers at once."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@contextmanager
def slowly(uri: str, seconds: float) -> Iterator[str]:
    """Yield the address of a proxy that answers later."""

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {k: v for k, v in self.headers.items() if k.lower() != "host"}
            time.sleep(seconds)
            theirs = requests.request(self.command, uri + self.path, data=body, headers=headers)
            self.send_response(theirs.status_code)
            self.send_header("Content-Type", theirs.headers.get("Content-Type", "text/plain"))
            self.send_header("Content-Length", str(len(theirs.content)))
            self.end_headers()
            self.wfile.write(theirs.content)

        do_GET = do_POST = do_PUT = do_PATCH = answer

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def measure(kind: str, steps: int, turns: int) -> dict[str, Any]:
    """Train against one server."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = folder / "store"
        store.mkdir()
        server = Server(store)
        stack.callback(server.kill)
        uri, healthy = server.uri, server.uri
        if kind == "file":
            uri = healthy = f"sqlite:///{store}/mlflow.db"
        elif kind == "refused":
            pass  # it is not started yet
        elif kind == "silent":
            mute = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
            uri = f"http://127.0.0.1:{mute.getsockname()[1]}"
        else:
            if kind == "full":
                mount(store, mib=16)
                stack.callback(unmount, store)
            server.start()
            if kind == "slow":
                uri = stack.enter_context(slowly(server.uri, 0.2))
        trainer = stack.enter_context(
            our_trainer(
                folder,
                model_config("4x256"),
                vocabulary("4x256"),
                rows=ROWS,
                seq_len=SEQ_LEN,
                optimizer={"lr": 1e-4, "clip_norm": 1.0},
                engine={"zero_stage": 0},
                tracking={"every_steps": 1},
            )
        )
        examples = packed_rows(ROWS, SEQ_LEN, vocab_size=vocabulary("4x256"))
        tracker = Tracker(folder, MlflowConfig(uri=uri, experiment="tracking"))
        tracker.start()
        assert tracker._child is not None
        child, made = tracker._child.pid, 0

        def train(number: int) -> None:
            nonlocal made
            for _ in range(number):
                train_step(trainer, iter(examples), ROWS)
                made += 1
                if made == 5 and kind == "dies":
                    server.kill()
                if made == 5 and kind == "full":
                    fill(store / "ballast")

        def turn(how: signal.Signals) -> Time:
            os.kill(child, how)
            with Stopwatch() as watch:
                train(steps)
            return watch.time

        train(5)
        end = time.monotonic() + 30  # its start is over by then: it has told, or tried to
        while time.monotonic() < end and kind in ("file", "server", "slow"):
            state = State.read(folder)
            if state is not None and state.delivered:
                break
            time.sleep(0.1)
        times = alternate(
            {
                "tracked": lambda _: turn(signal.SIGCONT),
                "alone": lambda _: turn(signal.SIGSTOP),
            },
            turns,
        )
        os.kill(child, signal.SIGCONT)
        began = time.monotonic()
        told = tracker.close("FINISHED")
        took = time.monotonic() - began
        return {
            "server": kind,
            "ratio": ratio(wall(times["tracked"]), wall(times["alone"])),
            "end_s": took,
            "told": told,
            "steps": made,
            "points": _deliver_rest(kind, folder, store, server, healthy),
        }


def _deliver_rest(kind: str, folder: Path, store: Path, server: Server, healthy: str) -> int:
    """Bring what is missing to a healthy server; return how many points it has, each once."""
    from mlflow import MlflowClient

    if kind == "full":
        (store / "ballast").unlink()
    if kind in ("refused", "silent", "dies"):
        server.start()
    state = State.read(folder)
    assert state is not None
    if kind == "silent":
        state.uri = healthy  # it stays silent
        state.write(folder)
    if problem := sync(folder, timeout_s=120):
        raise AssertionError(problem)
    state = State.read(folder)
    assert state is not None
    assert state.run_id is not None
    points = MlflowClient(healthy).get_metric_history(state.run_id, "train/loss")
    found = [point.step for point in points]
    assert len(found) == len(set(found)), "a point came twice"
    return len(found)


def main() -> None:
    """Measure one server after the other."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=SERVERS)
    parser.add_argument("--steps", type=int, default=20, help="a turn")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--threads", type=int, help="all cores by default")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    set_threads(arguments.threads)
    print_table(COLUMNS, [])
    rows = []
    for kind in arguments.servers:
        row = measure(kind, arguments.steps, arguments.turns)
        rows.append(row)
        told = "nothing" if row["told"] is None else row["told"].partition("(")[2].partition(")")[0]
        points = f"{row['points']} of {row['steps']}"
        print_rows([[kind, row["ratio"].digits(3), f"{row['end_s']:.1f}", told, points]])
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
