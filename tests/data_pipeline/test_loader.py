"""The order of samples does not depend on ranks, loader processes, micro-batches or stops."""

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.batch import Batch, Example, collate, make_example
from data_pipeline.corpus import Document
from data_pipeline.index import ShardIndex, read_shard
from data_pipeline.lanes import Cursor, Lane, Row
from data_pipeline.loader import TrainStream, open_stream
from data_pipeline.masking import mask_tokens
from data_pipeline.seeding import generator
from data_pipeline.shards import write_shards
from data_pipeline.specials import STANDARD
from data_pipeline.tokenizers import Tokenizer

SEED = 17
LANES = 8


def mask(row: Row, tokenizer: Tokenizer) -> Example:
    rng = generator(SEED, row.lane, *row.start)
    starts = tokenizer.word_starts(row.ids)
    input_ids, targets = mask_tokens(
        row.ids, row.lengths, starts, rng, rate=0.15, vocab_size=tokenizer.vocab_size
    )
    return make_example(row, input_ids, targets, row.ids[targets])


def unmasked(row: Row) -> Example:
    return make_example(row, row.ids, row.ids[:0], row.ids[:0])


def open_rank(
    index: ShardIndex, transform: Callable[[Row], Example], **options: Any
) -> TrainStream:
    settings: dict[str, Any] = {
        "seed": SEED,
        "lanes": LANES,
        "rank": 0,
        "world": 1,
        "workers": 0,
        "first_row": 0,
        "cursors": {},
    }
    return open_stream(index, transform=transform, **(settings | options))


class Stage(NamedTuple):
    """A part of a run: so many steps of so many rows of so many tokens."""

    seq_len: int
    global_batch: int
    steps: int


class Place(NamedTuple):
    """Where a run stands between two steps."""

    row: int
    cursors: Mapping[int, Cursor]


def hash_batches(batches: list[list[Batch]]) -> str:
    """Hash a global batch, given as each rank's micro-batches: rank r has rows r, r + world, ..."""
    ranks = [[digest for batch in rank for digest in batch.digests] for rank in batches]
    in_order = [digest for rows in zip(*ranks, strict=True) for digest in rows]
    packed = b"".join(digest.to_bytes(8, "little") for digest in in_order)
    return blake2b(packed, digest_size=8).hexdigest()


def run_stage(
    index: ShardIndex,
    transform: Callable[[Row], Example],
    stage: Stage,
    place: Place,
    world: int,
    workers: int,
    micro: int,
) -> tuple[list[str], Place]:
    """Run a stage on `world` ranks as a trainer does; return each step's hash and the end."""
    streams = [
        open_rank(
            index,
            transform,
            seq_len=stage.seq_len,
            rank=rank,
            world=world,
            workers=workers,
            first_row=place.row,
            cursors=place.cursors,
        )
        for rank in range(world)
    ]
    # Row j belongs to rank j mod world, so the rank of the step's first row moves with it.
    hashes = []
    cursors = dict(place.cursors)
    row = place.row
    for _ in range(stage.steps):
        batches = []
        for turn in range(world):
            rank = (row + turn) % world
            rows = stage.global_batch // world
            sizes = [min(micro, rows - start) for start in range(0, rows, micro)]
            batches.append([collate(list(islice(streams[rank], size))) for size in sizes])
        hashes.append(hash_batches(batches))
        for batch in (batch for rank_batches in batches for batch in rank_batches):
            cursors.update(batch.cursors)
        row += stage.global_batch
    for stream in streams:
        stream.close()
    return hashes, Place(row, cursors)


def run(
    index: ShardIndex,
    transform: Callable[[Row], Example],
    stages: list[Stage],
    world: int = 1,
    workers: int = 0,
    micro: int = 100,
    place: Place = Place(0, {}),  # noqa: B008 - immutable
) -> tuple[list[str], Place]:
    hashes: list[str] = []
    for stage in stages:
        part, place = run_stage(index, transform, stage, place, world, workers, micro)
        hashes.extend(part)
    return hashes, place


STAGES = [Stage(64, 12, 7), Stage(256, 20, 8), Stage(32, 4, 5)]  # 12 and 20 are no lanes' multiple


@pytest.fixture(scope="module")
def transform(tokenizer: Tokenizer) -> Callable[[Row], Example]:
    return partial(mask, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def reference(index: ShardIndex, transform: Callable[[Row], Example]) -> tuple[list[str], Place]:
    hashes, place = run(index, transform, STAGES)
    assert len(set(hashes)) == 20
    assert max(cursor.epoch for cursor in place.cursors.values()) > 0  # it crosses an epoch
    assert set(place.cursors) == set(range(LANES))
    return hashes, place


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize(("world", "micro"), [(1, 3), (2, 5), (4, 1)])
def test_global_batches_are_the_same_for_any_ranks_and_workers(
    index: ShardIndex,
    transform: Callable[[Row], Example],
    reference: tuple[list[str], Place],
    world: int,
    workers: int,
    micro: int,
) -> None:
    assert run(index, transform, STAGES, world, workers, micro) == reference


@given(
    stop=st.integers(0, 19),
    worlds=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    micro=st.integers(1, 30),
)
@settings(max_examples=40, deadline=None)
def test_a_stop_at_any_step_changes_nothing(
    index: ShardIndex,
    transform: Callable[[Row], Example],
    reference: tuple[list[str], Place],
    stop: int,
    worlds: tuple[int, int],
    micro: int,
) -> None:
    before, after = [], []
    for stage in STAGES:
        done = min(stop, stage.steps)
        stop -= done
        before.append(stage._replace(steps=done))
        after.append(stage._replace(steps=stage.steps - done))
    first, place = run(index, transform, before, worlds[0], 0, micro)
    second, end = run(index, transform, after, worlds[1], 0, 7, place)
    assert (first + second, end) == reference


@pytest.mark.parametrize("stop", [1, 9])
def test_a_stop_with_loader_processes_changes_nothing(
    index: ShardIndex,
    transform: Callable[[Row], Example],
    reference: tuple[list[str], Place],
    stop: int,
) -> None:
    """The rows that loader processes had made beyond the stop are made again."""
    first, second, third = STAGES
    done = min(stop, first.steps), max(stop - first.steps, 0)
    head, place = run(
        index, transform, [first._replace(steps=done[0]), second._replace(steps=done[1])], 2, 2
    )
    rest = [
        first._replace(steps=first.steps - done[0]),
        second._replace(steps=second.steps - done[1]),
        third,
    ]
    tail, end = run(index, transform, rest, 1, 2, 4, place)
    assert (head + tail, end) == reference


def test_what_must_matter_does(
    index: ShardIndex,
    transform: Callable[[Row], Example],
    reference: tuple[list[str], Place],
) -> None:
    """Negative controls: another seed, a lost cursor or a lost row shows in the hashes."""
    start = Place(0, {})
    hashes = reference[0]
    plain, _ = run(index, unmasked, STAGES)
    assert not set(plain) & set(hashes)
    _, place = run_stage(index, transform, STAGES[0], start, 1, 0, 9)
    lost = {lane: cursor for lane, cursor in place.cursors.items() if lane != 3}
    assert run(index, transform, STAGES[1:], place=Place(place.row, lost))[0] != hashes[7:]
    assert (
        run(index, transform, STAGES[1:], place=Place(place.row + 1, place.cursors))[0]
        != (hashes[7:])
    )
    assert run(index, transform, STAGES[1:], place=place)[0] == hashes[7:]


def test_rows_come_from_lanes_in_turn(index: ShardIndex) -> None:
    lanes = [Lane(index, seed=SEED, lane=lane, lanes=LANES) for lane in range(LANES)]
    expected = [lanes[row % LANES].next_row(48) for row in range(3 * LANES)]
    stream = open_rank(index, unmasked, seq_len=48)
    for row, example in zip(expected, stream, strict=False):
        assert example.lane == row.lane
        assert example.cursor == row.cursor
        assert example.input_ids.tolist() == row.ids.tolist()


@pytest.mark.parametrize(
    ("first_row", "workers"), [*((row, 0) for row in range(9)), (3, 2), (6, 2)]
)
def test_any_first_row(
    index: ShardIndex, transform: Callable[[Row], Example], first_row: int, workers: int
) -> None:
    for rank in range(2):
        stream = open_rank(
            index,
            transform,
            seq_len=16,
            rank=rank,
            world=2,
            workers=workers,
            first_row=first_row,
        )
        rows = [row for row in range(first_row, first_row + 12) if row % 2 == rank]
        assert [example.lane for example in islice(stream, 6)] == [row % LANES for row in rows]
        stream.close()


@pytest.mark.parametrize(("lanes", "world", "workers"), [(8, 3, 0), (8, 1, 3), (8, 4, 4)])
def test_lanes_that_cannot_be_shared_out(
    index: ShardIndex, transform: Callable[[Row], Example], lanes: int, world: int, workers: int
) -> None:
    message = rf"data\.lanes={lanes} is not a multiple of {world} ranks x data\.workers={workers}"
    with pytest.raises(ValueError, match=message):
        open_rank(index, transform, seq_len=8, lanes=lanes, world=world, workers=workers)


def write(folder: Path, documents: list[list[str]], tokenizer: Tokenizer) -> ShardIndex:
    """Write shards of exactly these documents."""
    shards = [
        write_shards(
            [Document(text, text) for text in texts],
            tokenizer,
            folder / str(number),
            seed=0,
            min_shards=1,
            shard_mib=64,
            workers=1,
        )
        for number, texts in enumerate(documents)
    ]
    infos = tuple(
        shard.shards[0].model_copy(update={"url": f"{number}/{shard.shards[0].url}"})
        for number, shard in enumerate(shards)
    )
    sums = {name: sum(getattr(shard, name) for shard in shards) for name in ("docs", "tokens")}
    return shards[0].model_copy(update={"folder": folder, "shards": infos, **sums})


@pytest.mark.parametrize("lanes", [2, 4, 16])
def test_ranks_with_very_different_shards_take_the_same_number_of_rows(
    tmp_path: Path, transform: Callable[[Row], Example], tokenizer: Tokenizer, lanes: int
) -> None:
    sizes = (100, 10, 50, 1)
    texts = [[f"words of {n} in {s}" for n in range(size)] for s, size in enumerate(sizes)]
    index = write(tmp_path, texts, tokenizer)
    seen: set[bytes] = set()
    for rank in range(2):
        stream = open_rank(index, transform, seq_len=16, lanes=lanes, rank=rank, world=2)
        examples = list(islice(stream, 400))
        assert len(examples) == 400
        assert {example.lane % 2 for example in examples} == {rank}
        epochs = [example.cursor.epoch for example in examples]
        assert max(epochs) > 1
        seen |= {unmasked_row.tobytes() for unmasked_row in split_at_documents(examples)}
    assert len(seen) == sum(sizes)


def split_at_documents(examples: list[Example]) -> list[np.ndarray]:
    """Return every whole document of each lane of examples, unmasked."""
    found = []
    for lane in {example.lane for example in examples}:
        ids = np.concatenate([unmask(example) for example in examples if example.lane == lane])
        parts = np.split(ids, np.flatnonzero(ids == STANDARD.cls))
        found += [part for part in parts[1:] if part[-1] == STANDARD.sep]
    return found


def unmask(example: Example) -> np.ndarray:
    ids = example.input_ids.copy()
    ids[example.target_index] = example.targets
    return ids


@pytest.mark.parametrize("world", [1, 4])
def test_one_document_for_more_ranks_and_lanes(
    tmp_path: Path, transform: Callable[[Row], Example], tokenizer: Tokenizer, world: int
) -> None:
    index = write(tmp_path, [["a single document"]], tokenizer)
    (document,) = read_shard(index, 0)
    for rank in range(world):
        stream = open_rank(index, transform, seq_len=len(document) + 2, rank=rank, world=world)
        for example in islice(stream, 20):
            assert unmask(example).tolist() == [STANDARD.cls, *document.tolist(), STANDARD.sep]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_shard_stops_the_run_with_its_name(
    index: ShardIndex, transform: Callable[[Row], Example], workers: int, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(index.folder, tmp_path / "copy"))
    damaged = folder / "shard-00004.tar"
    damaged.write_bytes(damaged.read_bytes()[:-2048])
    stream = open_rank(
        index.model_copy(update={"folder": folder}), transform, seq_len=64, workers=workers
    )
    with pytest.raises(ValueError, match=rf"^{damaged}: has \d+ bytes") as caught:
        for _ in stream:
            pass
    assert "\n" not in str(caught.value)


def test_opening_a_stream_leaves_the_models_random_numbers_alone(
    index: ShardIndex, transform: Callable[[Row], Example]
) -> None:
    before = torch.get_rng_state()
    stream = open_rank(index, transform, seq_len=16, workers=1)
    next(stream)
    stream.close()
    assert torch.equal(torch.get_rng_state(), before)


class Garbage:
    """Unreachable but for the collector, as an old engine is; tells which process finalises it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._itself = self

    def __del__(self) -> None:
        with self._file.open("a") as file:
            file.write(f"{os.getpid()}\n")


def test_loader_processes_leave_the_trainers_garbage_to_it(
    index: ShardIndex, transform: Callable[[Row], Example], tmp_path: Path
) -> None:
    def collect(row: Row) -> Example:
        gc.collect()
        return transform(row)

    gc.collect()
    Garbage(tmp_path / "finalised")
    stream = open_rank(index, collect, seq_len=16, workers=2)
    next(stream)
    stream.close()
    gc.collect()
    assert (tmp_path / "finalised").read_text() == f"{os.getpid()}\n"


def test_signals_leave_loader_processes_alone_and_close_ends_them(
    index: ShardIndex, transform: Callable[[Row], Example]
) -> None:
    stream = open_rank(index, transform, seq_len=16, workers=2)
    next(stream)
    processes = list(stream._loading._workers)
    for process in processes:
        os.kill(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGINT)
    assert len(list(islice(stream, 400))) == 400  # far beyond what was prefetched
    assert all(process.is_alive() for process in processes)
    stream.close()
    for process in processes:
        process.join(timeout=10)
        assert not process.is_alive()
    assert next(stream, None) is None
    stream.close()


ABANDON = """
import sys
from data_pipeline.batch import make_example
from data_pipeline.index import load_index
from data_pipeline.loader import open_stream

def transform(row):
    return make_example(row, row.ids, row.ids[:0], row.ids[:0])

stream = open_stream(load_index(sys.argv[1]), seed=0, lanes=8, seq_len=16, rank=0, world=1,
                     workers=2, first_row=0, cursors={}, transform=transform)
next(stream)
raise SystemExit(3)
"""


def test_a_program_that_forgets_to_close_still_ends(index: ShardIndex) -> None:
    command = [sys.executable, "-c", ABANDON, str(index.folder)]
    assert subprocess.run(command, timeout=60, check=False).returncode == 3
