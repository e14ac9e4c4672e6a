"""Building shards: the rate of tokenizing against SentencePiece alone, and the peak memory.

    python -m tests.benchmarks.building TEXT... [--kind unigram] [--vocab-size 8000]
        [--mb 60] [--workers 0] [--turns 5] [--json results.json]

The sides take turns over the same documents with the same model and as many processes.
SentencePiece alone encodes texts that are in memory already, as a list to its own threads or one
after another in forked processes, and drops the ids. `roformer shards` reads and parses files,
encodes, and writes the ids to disk (the first of its two halves), then writes the shards (the
second). Processor times are those of all processes.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

from data_pipeline.config import TokenizerConfig
from data_pipeline.corpus import read_documents
from data_pipeline.shards import Layout, plan_building
from data_pipeline.tokenizers import load_tokenizer, train_tokenizer
from data_pipeline.tokenizing import Encoder, EncoderPool
from tests.benchmarks.timing import Time, alternate, cpu, print_table, ratio, wall, write_json

MB = 10**6


def processor_time() -> float:
    """Return the seconds that this process and its ended children have used."""
    own, children = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def timed(work: Callable[[], object]) -> Time:
    started, used = time.perf_counter(), processor_time()
    work()
    return Time(time.perf_counter() - started, processor_time() - used)


def peak_mib(work: Callable[[], object]) -> tuple[float, float]:
    """Return the peak memory of a process that does the work, and of its largest child."""
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def measured() -> None:
        work()
        sides = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        sender.send([resource.getrusage(who).ru_maxrss / 1024 for who in sides])

    process = context.Process(target=measured)
    process.start()
    own, child = receiver.recv()
    process.join()
    return own, child


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("text", nargs="+")
    parser.add_argument("--kind", default="unigram")
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--mb", type=float, default=60, help="how much of the text, in MB")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    workers = arguments.workers or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        config = TokenizerConfig(
            kind=arguments.kind,
            model=f"{folder}/m",
            vocab_size=arguments.vocab_size,
            sample_mchars=5,
        )
        train_tokenizer(config, islice(read_documents(arguments.text), 2000))
        tokenizer = load_tokenizer(config)
        texts, size = [], 0
        with open(folder / "text.jsonl", "w", encoding="utf-8") as file:
            for document in read_documents(arguments.text):
                texts.append(document.text)
                size += len(document.text.encode())
                file.write(json.dumps({"text": document.text}, ensure_ascii=False) + "\n")
                if size > arguments.mb * MB:
                    break
        encoder = Encoder(tokenizer)

        def build(turn: int, *, write: bool) -> Time:
            layout = Layout(seed=1, min_shards=16, shard_mib=64)
            building = plan_building(
                folder / f"shards{turn}", [f"{folder}/text.jsonl"], encoder, layout
            )
            with building.locked(shared=True):

                def tokenize() -> None:
                    with EncoderPool(encoder, workers) as pool:
                        building.tokenize(pool)

                if not write:
                    building.place.clear()
                    building.place.path.mkdir()
                    return timed(tokenize)
                tokenize()
                taken = timed(lambda: building.write(workers=workers))
                building.place.clear()
                return taken

        def threads(turn: int) -> Time:
            return timed(lambda: tokenizer._processor.encode(texts, num_threads=workers))  # type: ignore[attr-defined]

        def share(number: int) -> None:
            for text in texts[number::workers]:
                tokenizer.encode(text)

        def processes(turn: int) -> Time:
            def work() -> None:
                started = [
                    get_context("fork").Process(target=share, args=(n,)) for n in range(workers)
                ]
                for process in started:
                    process.start()
                for process in started:
                    process.join()

            return timed(work)

        sides = {
            "SentencePiece, processes": processes,
            "roformer shards, tokenizing": lambda turn: build(turn, write=False),
        }
        if hasattr(tokenizer, "_processor"):
            sides["SentencePiece, threads"] = threads
        times = alternate(sides, arguments.turns)
        rows, told = [], []
        for name, taken in times.items():
            best = times["SentencePiece, processes"]
            rates = sorted(size / MB / t for t in wall(taken))
            row = {
                "side": name,
                "MB/s": f"{rates[len(rates) // 2]:.1f}",
                "rate of SentencePiece's (wall)": str(ratio(wall(best), wall(taken))),
                "(processor time)": str(ratio(cpu(best), cpu(taken))),
            }
            told.append(row)
            rows.append(list(row.values()))
        print(f"{size / MB:.0f} MB in {len(texts):,} documents, {workers} processes")
        print_table(list(told[0]), rows)
        written = build(0, write=True)
        rate = size / MB / written.cpu
        print(f"writing the shards: {rate:.0f} MB of text a second of processor time")
        texts.clear()
        own, child = peak_mib(lambda: build(0, write=False))
        print(f"peak memory, tokenizing: {own:.0f} MiB, each of its processes {child:.0f} MiB")
        own, _ = peak_mib(lambda: build(0, write=True))
        print(f"peak memory, both halves: {own:.0f} MiB")
        write_json(arguments.json, told)


if __name__ == "__main__":
    main()
