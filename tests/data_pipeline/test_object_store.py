"""Shards at s3:// and gs://, through their own clients, from servers on loopback."""

import logging
import socketserver
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import fsspec
import pytest
from fsspec import AbstractFileSystem

from data_pipeline.batch import Example, make_example
from data_pipeline.cache import Cache
from data_pipeline.index import ShardIndex, load_index, read_shard
from data_pipeline.lanes import Row
from data_pipeline.loader import open_stream
from data_pipeline.reading import Reading
from data_pipeline.sources import Patience, SourceError, chunks, expand, stat
from trainer.distributed import free_port

HASTY = Patience(connect_s=5.0, read_s=10.0, retries=1, pause_s=0.01)


@contextmanager
def s3_server(patch: pytest.MonkeyPatch) -> Iterator[AbstractFileSystem]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    patch.setenv("AWS_ACCESS_KEY_ID", "hunter1")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    patch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{port}")
    fs = fsspec.filesystem("s3")
    fs.mkdir("bucket")
    yield fs
    server.stop()


@contextmanager
def gs_server(patch: pytest.MonkeyPatch) -> Iterator[AbstractFileSystem]:
    from gcp_storage_emulator.server import create_server

    port = free_port()
    # readers that have enough hang up, and it would print a traceback for each
    patch.setattr(socketserver.BaseServer, "handle_error", lambda *_: None)
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # asks Google what bucket it is
    yield fsspec.filesystem("gs")
    server.stop()


@pytest.fixture(scope="module", params=["s3", "gs"])
def bucket(request: pytest.FixtureRequest, index: ShardIndex) -> Iterator[str]:
    """Put the shards into a bucket; return its URL."""
    server = {"s3": s3_server, "gs": gs_server}[request.param]
    with pytest.MonkeyPatch.context() as patch, server(patch) as fs:
        for path in sorted(index.folder.iterdir()):
            fs.put_file(str(path), f"bucket/train/{path.name}")
        yield f"{request.param}://bucket/train"


def test_an_index_and_its_shards_are_read(bucket: str, index: ShardIndex) -> None:
    remote = load_index(bucket, HASTY)
    assert remote.sha256 == index.sha256
    for shard in range(3):
        expected = read_shard(index, shard)
        for ids, same in zip(read_shard(remote, shard), expected, strict=True):
            assert ids.tolist() == same.tolist()


def test_patterns_and_sizes(bucket: str, index: ShardIndex) -> None:
    urls = expand(f"{bucket}/shard-*.tar", HASTY)
    assert urls == [f"{bucket}/{info.url}" for info in index.shards]
    facts = stat(urls[0], HASTY)
    assert facts.size == index.shards[0].bytes
    assert facts.version


def test_what_is_not_there_is_one_line(bucket: str) -> None:
    with pytest.raises(SourceError, match=rf"^{bucket}/x\.tar: byte 0: does not exist$"):
        list(chunks(f"{bucket}/x.tar", HASTY))
    with pytest.raises(SourceError, match="no file matches"):
        expand(f"{bucket}/x-*.tar", HASTY)


def unmasked(row: Row) -> Example:
    return make_example(row, row.ids, row.ids[:0], row.ids[:0])


def test_loader_processes_read_a_store_that_their_parent_has_read(
    bucket: str, index: ShardIndex, tmp_path: Path
) -> None:
    reading = Reading(patience=HASTY, cache=Cache(tmp_path / "cache", 2**30, HASTY))
    remote = load_index(bucket, HASTY).model_copy(update={"reading": reading})
    remote.read(0)
    digests = []
    for shards, workers in ((index, 0), (remote, 2)):
        stream = open_stream(
            shards,
            seed=1,
            lanes=4,
            seq_len=64,
            rank=0,
            world=1,
            workers=workers,
            first_row=0,
            cursors={},
            transform=unmasked,
        )
        digests.append([example.digest for example in islice(stream, 900)])
        stream.close()
    assert digests[0] == digests[1]
    files = [path for path in (tmp_path / "cache").iterdir() if path.name != "lock"]
    assert len(files) == len(index.shards)
