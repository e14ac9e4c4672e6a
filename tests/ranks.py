"""Runs a function as the ranks of a real gloo process group, one process each."""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

from trainer.distributed import free_port


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 300) -> list:
    """Call `function(*args)` on every rank; return what each returned, in rank order.

    A rank that raises fails the caller with its traceback, and one that gives no answer with the
    place where it stands; all ranks are ended then.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _run(world, function, args, timeout_s, Path(folder))


def _run(
    world: int, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float, folder: Path
) -> list:
    context = multiprocessing.get_context("spawn")
    port = free_port()
    pipes, processes = [], []
    for rank in range(world):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank,
            args=(rank, world, port, folder / str(rank), sender, function, args),
            daemon=False,
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        answers: dict[int, tuple[str, Any]] = {}
        patience_s = timeout_s
        while len(answers) < world:
            waiting = {pipes[rank]: rank for rank in range(world) if rank not in answers}
            ready = wait(list(waiting), patience_s)
            for receiver in ready:
                try:
                    answers[waiting[receiver]] = pickle.loads(receiver.recv_bytes())
                except EOFError:
                    answers[waiting[receiver]] = ("error", "it ended without an answer")
            if not ready:
                break
            if any(kind == "error" for kind, _ in answers.values()):
                patience_s = 10.0  # for what the others say: the first to fail is seldom the cause
        failed = [
            f"rank {rank}:\n{text}" for rank, (kind, text) in answers.items() if kind == "error"
        ]
        for rank in set(range(world)) - set(answers):
            silent = psutil.Process(processes[rank].pid)
            for process in (silent, *silent.children()):  # those are forked: loader processes
                process.send_signal(signal.SIGUSR2)
                processes[rank].join(1)  # it does not end: time to write before the next one
            failed.append(f"rank {rank} gave no answer:\n{(folder / str(rank)).read_text()}")
        assert not failed, f"{len(failed)} of {world} ranks failed\n" + "\n".join(failed)
        return [answers[rank][1] for rank in range(world)]
    finally:
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()


def _rank(
    rank: int,
    world: int,
    port: int,
    stack: Path,
    sender: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    with stack.open("w") as file:
        faulthandler.register(signal.SIGUSR2, file, all_threads=True)
        answer = _answer(function, args)
        faulthandler.unregister(signal.SIGUSR2)
    sender.send_bytes(pickle.dumps(answer))  # by value: torch's own pickler shares memory


def _answer(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "value", function(*args)
    except BaseException:
        return "error", traceback.format_exc()
