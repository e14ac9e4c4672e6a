"""How fast one loader process makes masked batches of token shards, and what others reach.

    python -m tests.benchmarks.streaming            rates, all in one run, and where our time goes
    python -m tests.benchmarks.streaming --resume   time to the first batch over loopback http

The same documents (words of one to three pieces), rows of 512 tokens, 32 rows a batch:

- ours: packed rows, whole words masked 80/10/10, one loader process
- WebDataset, torch's DataLoader and transformers' collator for whole words (what works with its
  version 5: DataCollatorForLanguageModeling(whole_word_mask=True), which replaces by [MASK] alone):
  a row a document, cut or padded, one loader process; its tokens are counted without padding
- mosaicml-streaming: rows of 512 packed beforehand, masked as ours, one loader process. Its pins
  contradict ours; where it cannot be imported, it is left out, saying so.

A rate is given by the clock and by the loader process's own processor time, which other work on
the machine disturbs less. The best of the rounds counts, and rounds of all take turns.
"""

import argparse
import cProfile
import io
import json
import os
import pstats
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import islice
from multiprocessing import Process, Queue
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from torch.utils.data import DataLoader

from data_pipeline.batch import collate
from data_pipeline.cache import Cache
from data_pipeline.index import ShardIndex, load_index
from data_pipeline.lanes import Cursor
from data_pipeline.loader import TrainStream, open_stream
from data_pipeline.masking import mask_tokens
from data_pipeline.reading import Reading
from data_pipeline.specials import STANDARD
from tests.data_pipeline.server import serving
from trainer.objectives import MaskedLanguageModeling

VOCABULARY, WORD_STARTS = 20_000, 12_000
SEQ_LEN, ROWS = 512, 32


class Pieces:
    """A tokenizer of which masking needs to know alone where words start."""

    kind, vocab_size, sha256, specials = "pieces", VOCABULARY, "0" * 64, STANDARD

    def word_starts(self, ids: np.ndarray) -> np.ndarray:
        return ids < WORD_STARTS


def write_shards(folder: Path, shards: int, documents: int, seed: int = 0) -> ShardIndex:
    """Write shards of documents of 20 to 1,500 tokens."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    entries = []
    for shard in range(shards):
        path = folder / f"shard-{shard:05d}.tar"
        tokens = 0
        with open(path, "wb") as file, webdataset.TarWriter(file, mtime=0) as writer:
            for number in range(documents):
                length = int(rng.integers(20, 1500))
                tokens += length
                ids = rng.integers(5, VOCABULARY, length).astype("<u2")
                writer.write({"__key__": f"{shard * documents + number:09d}", "npy": ids})
        content = path.read_bytes()
        facts = {"url": path.name, "docs": documents, "tokens": tokens, "bytes": len(content)}
        entries.append({**facts, "sha256": sha256(content).hexdigest()})
    index = {
        "shards": entries,
        "dtype": "uint16",
        "tokenizer_sha256": "0" * 64,
        "tokenizer_kind": "bytes",
        "vocab_size": VOCABULARY,
        "docs": shards * documents,
        "tokens": sum(int(entry["tokens"]) for entry in entries),
        "seed": 0,
    }
    (folder / "index.json").write_text(json.dumps(index))
    return load_index(folder)


def open_ours(index: ShardIndex, workers: int, **place: Any) -> TrainStream:
    transform = MaskedLanguageModeling(Pieces(), 1, 0.15, True)  # type: ignore[arg-type]
    options: dict[str, Any] = {"lanes": 8, "first_row": 0, "cursors": {}} | place
    return open_stream(
        index,
        seed=1,
        seq_len=SEQ_LEN,
        rank=0,
        world=1,
        workers=workers,
        transform=transform,
        **options,
    )


Batches = tuple[Iterator[int], Callable[[], list[int]]]
"""Numbers of tokens of batches, and the loader's processes."""


def ours(index: ShardIndex) -> Batches:
    stream = open_ours(index, workers=1)
    batches = (collate(list(islice(stream, ROWS))).num_tokens for _ in iter(int, 1))
    return batches, lambda: [process.pid for process in stream._loading._workers]


def plain(index: ShardIndex) -> Batches:
    from transformers import BertTokenizerFast, DataCollatorForLanguageModeling

    words = [f"w{n}" if n < WORD_STARTS else f"##{n}" for n in range(5, VOCABULARY)]
    vocabulary = {
        w: n for n, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])
    }
    tokenizer = BertTokenizerFast(vocab=vocabulary)
    collator = DataCollatorForLanguageModeling(
        tokenizer, whole_word_mask=True, mlm_probability=0.15
    )

    def features(document: np.ndarray) -> dict[str, Any]:
        ids = [STANDARD.cls, *document[: SEQ_LEN - 2].tolist(), STANDARD.sep]
        ids += [STANDARD.pad] * (SEQ_LEN - len(ids))
        # What a tokenizer would have said: a new word stands apart from the one before.
        starts = np.cumsum(1 + (np.array(ids) < WORD_STARTS))
        offsets = np.stack([starts, starts + 1], axis=1)
        offsets[np.array(ids) < len(STANDARD)] = 0
        return {
            "input_ids": ids,
            "special_tokens_mask": [int(token < len(STANDARD)) for token in ids],
            "offset_mapping": offsets.tolist(),
        }

    urls = [str(index.path(shard)) for shard in range(len(index.shards))]
    dataset = webdataset.WebDataset(urls, shardshuffle=False).decode().to_tuple("npy").repeat()

    def collated(documents: list[tuple[np.ndarray]]) -> Any:
        return collator([features(document) for (document,) in documents])

    loader = iter(DataLoader(dataset, batch_size=ROWS, num_workers=1, collate_fn=collated))
    batches = (int((batch["input_ids"] != STANDARD.pad).sum()) for batch in loader)
    return batches, lambda: [process.pid for process in loader._workers]


def mosaic(index: ShardIndex, folder: Path) -> Batches:
    from streaming import MDSWriter, StreamingDataset

    stream = open_ours(index, workers=0)
    rows = 6 * ROWS * 32
    with MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint16:{SEQ_LEN}"}) as writer:
        for example in islice(stream, rows):
            writer.write({"tokens": example.input_ids.astype(np.uint16)})
    rng, pieces = np.random.default_rng(0), Pieces()

    def masked(samples: list[dict[str, np.ndarray]]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = [], []
        for sample in samples:
            ids = sample["tokens"].astype(np.int64)
            shown, places = mask_tokens(
                ids, (len(ids),), pieces.word_starts(ids), rng, rate=0.15, vocab_size=VOCABULARY
            )
            inputs.append(shown)
            targets.append(ids[places])
        return torch.from_numpy(np.stack(inputs)), torch.from_numpy(np.concatenate(targets))

    dataset = StreamingDataset(
        local=str(folder), batch_size=ROWS, shuffle=True, epoch_size=100 * rows
    )
    processes: list[int] = []

    def endless() -> Iterator[int]:
        while True:
            loader = iter(DataLoader(dataset, batch_size=ROWS, num_workers=1, collate_fn=masked))
            processes[:] = [process.pid for process in loader._workers]
            for inputs, _ in loader:
                yield inputs.numel()

    return endless(), lambda: processes


def processor_s(pids: list[int]) -> float:
    """Return the processor time that processes have used."""
    total = 0.0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def measure(batches: Batches, number: int) -> tuple[float, float]:
    """Return millions of tokens a second, by the clock and by the loader's processor time."""
    stream, pids = batches
    for _ in range(4):
        next(stream)
    used, started = processor_s(pids()), time.perf_counter()
    tokens = sum(next(stream) for _ in range(number))
    elapsed, busy = time.perf_counter() - started, processor_s(pids()) - used
    return tokens / elapsed / 1e6, tokens / max(busy, 1e-9) / 1e6


def compare(folder: Path, rounds: int) -> None:
    index = write_shards(folder / "train", shards=16, documents=600)
    kinds: dict[str, tuple[Batches, int]] = {
        "ours": (ours(index), 300),
        "webdataset + transformers": (plain(index), 6),
    }
    try:
        kinds["mosaicml-streaming"] = (mosaic(index, folder / "mds"), 160)
    except ImportError as error:
        print(f"mosaicml-streaming is left out: {error}")
    best = dict.fromkeys(kinds, (0.0, 0.0))
    for _ in range(rounds):
        for name, (batches, number) in kinds.items():
            rates = measure(batches, number)
            best[name] = (max(best[name][0], rates[0]), max(best[name][1], rates[1]))
    print("M tokens/s of a loader process            clock   processor")
    for name, (clock, busy) in best.items():
        print(f"{name:40} {clock:7.2f}   {busy:7.2f}   ours is {best['ours'][1] / busy:.1f} x")


def profile(folder: Path) -> None:
    """Tell where our time goes, within one process."""
    stream = open_ours(load_index(folder / "train"), workers=0)
    list(islice(stream, 64))
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(100):
        collate(list(islice(stream, ROWS)))
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("cumulative").print_stats(
        "next_row|read_shard|mask_tokens|make_example|generator|word_starts|collate|_open"
    )
    print(
        "\n".join(line for line in text.getvalue().splitlines() if ".py" in line or "cum" in line)
    )


def serve(folder: Path, port: "Queue[int]") -> None:
    with serving(folder) as server:
        port.put(server.server_port)
        server.closing.wait()


def first_batches(folder: Path, rounds: int) -> None:
    """Compare a fresh start with one that goes on half-way through its shards, caches empty."""
    lanes = 4
    index = write_shards(folder / "train", shards=2 * lanes, documents=27_500)
    print(f"{len(index.shards)} shards of {index.shards[0].bytes / 2**20:.1f} MiB")
    stream = open_ours(index, 0, lanes=lanes)
    cursors: dict[int, Cursor] = {}
    rows = 0
    while min((cursor.document for cursor in cursors.values()), default=0) < 13_000:
        example = next(stream)
        cursors[example.lane] = example.cursor
        rows += 1
    port: Queue[int] = Queue()
    server = Process(target=serve, args=(folder, port), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{port.get()}/ok/train/index.json"
    times: dict[str, list[float]] = {"fresh": [], "resumed": []}
    for turn in range(rounds):
        for name, place in (("fresh", {}), ("resumed", {"first_row": rows, "cursors": cursors})):
            cache = Cache(folder / f"cache-{turn}-{name}", 2**34)
            remote = load_index(url).model_copy(update={"reading": Reading(cache=cache)})
            started = time.perf_counter()
            stream = open_ours(remote, 1, lanes=lanes, **place)
            collate(list(islice(stream, ROWS)))
            times[name].append(time.perf_counter() - started)
            stream.close()
    server.kill()
    fresh, resumed = (min(times[name]) for name in ("fresh", "resumed"))
    print(f"first batch: fresh {fresh:.2f} s, resumed {resumed:.2f} s, {resumed / fresh:.2f} x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.resume:
            first_batches(Path(folder), arguments.rounds)
        else:
            compare(Path(folder), arguments.rounds)
            profile(Path(folder))


if __name__ == "__main__":
    main()
