"""Runs a function as the ranks of a real gloo process group, one process each."""

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from trainer.distributed import free_port


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 300) -> list:
    """Call `function(*args)` on every rank; return what each returned, in rank order.

    A rank that raises fails the caller with its traceback; all ranks are ended then.
    """
    context = multiprocessing.get_context("spawn")
    port = free_port()
    pipes, processes = [], []
    for rank in range(world):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(rank, world, port, sender, function, args), daemon=False
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
        assert not failed, f"of {world} ranks failed\n" + "\n".join(failed)
        if len(answers) < world:
            raise TimeoutError(f"{world - len(answers)} of {world} ranks gave no answer in time")
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
    try:
        answer = ("value", function(*args))
    except BaseException:
        answer = ("error", traceback.format_exc())
    sender.send_bytes(pickle.dumps(answer))  # by value: torch's own pickler shares memory
