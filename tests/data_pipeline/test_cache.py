import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.cache import PARTIAL, Cache
from data_pipeline.sources import Patience, SourceError, Stat, stat
from tests.data_pipeline.server import Server, serving

SIZE = 200_000
HASTY = Patience(connect_s=2.0, read_s=2.0, retries=1, pause_s=0.01)


def fine(content: bytes) -> str | None:
    return None


def content(name: str) -> bytes:
    return name.encode() * SIZE


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "served"
    folder.mkdir()
    for name in "abcdef":
        (folder / name).write_bytes(content(name))
    with serving(folder) as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", 3 * SIZE, HASTY)


def files(cache: Cache) -> list[Path]:
    return [path for path in cache.folder.iterdir() if path.name != "lock"]


def used(cache: Cache) -> int:
    return sum(path.stat().st_size for path in files(cache))


def read(cache: Cache, url: str) -> bytes:
    return cache.read(url, stat(url, HASTY), fine)


def test_what_is_there_is_not_fetched_again(server: Server, cache: Cache) -> None:
    url = server.url("ok", "a")
    known = stat(url, HASTY)
    for _ in range(3):
        assert cache.read(url, known, fine) == content("a")
    assert server.requests["/ok/a"] == 2  # one of them for the size
    assert [path.read_bytes() for path in files(cache)] == [content("a")]
    # a source that has changed since is another
    cache.read(url, Stat(SIZE, "newer"), fine)
    assert server.requests["/ok/a"] == 3


def test_it_never_holds_more_than_its_limit(server: Server, cache: Cache) -> None:
    for name in "abcadef":
        assert read(cache, server.url("ok", name)) == content(name)
        assert used(cache) <= 3 * SIZE
    held = {path.read_bytes()[:1] for path in files(cache)}
    assert held == {b"d", b"e", b"f"}
    os.utime(next(path for path in files(cache) if path.read_bytes()[:1] == b"d"))
    read(cache, server.url("ok", "a"))
    assert b"d" in {path.read_bytes()[:1] for path in files(cache)}  # used last, not e


def test_a_source_over_the_limit_names_the_key(server: Server, tmp_path: Path) -> None:
    small = Cache(tmp_path / "small", SIZE - 1, HASTY)
    with pytest.raises(SourceError, match=rf"/ok/a: {SIZE} bytes do not fit data\.cache_gib"):
        read(small, server.url("ok", "a"))
    assert files(small) == []


def test_damage_on_the_disk_is_mended_and_damage_at_the_source_told(
    server: Server, cache: Cache
) -> None:
    url = server.url("ok", "a")
    known = stat(url, HASTY)

    def check(read: bytes) -> str | None:
        return None if read == content("a") else "is damaged"

    cache.read(url, known, check)
    (path,) = files(cache)
    path.write_bytes(b"damaged")
    assert cache.read(url, known, check) == content("a")
    with pytest.raises(SourceError, match=r"/ok/a: is wrong"):
        cache.read(url, known, lambda read: "is wrong")
    assert files(cache) == []


def test_a_failed_fetch_leaves_nothing(server: Server, cache: Cache) -> None:
    with pytest.raises(SourceError, match="byte"):
        cache.read(server.url("closedelimited", "a"), Stat(SIZE, ""), fine)
    assert files(cache) == []


def test_many_threads_fetch_a_file_once(server: Server, cache: Cache) -> None:
    url = server.url("ok", "b")
    threads = [threading.Thread(target=cache.fetch, args=(url, Stat(SIZE, ""))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.requests["/ok/b"] == 1
    assert read(cache, url) == content("b")


def test_fetching_ahead_brings_what_is_asked_for(server: Server, cache: Cache) -> None:
    urls = {name: server.url("ok", name) for name in "abc"}
    cache.fetch_ahead(server.url("404", "a"), Stat())  # an error shows when it is read
    for url in urls.values():
        cache.fetch_ahead(url, Stat(SIZE, ""))
    for name, url in urls.items():
        assert cache.read(url, Stat(SIZE, ""), fine) == content(name)
        assert server.requests[f"/ok/{name}"] == 1


FETCH = """
import sys
from pathlib import Path
from data_pipeline.cache import Cache
from data_pipeline.sources import Patience, Stat
folder, limit, *urls = sys.argv[1:]
cache = Cache(Path(folder), int(limit), Patience(read_s=20.0))
for url in urls:
    content = cache.read(url, Stat(200_000, ""), lambda content: None)
    assert len(set(content)) == 1 and len(content) == 200_000
"""


def start(cache: Cache, *urls: str) -> subprocess.Popen:
    command = [sys.executable, "-c", FETCH, str(cache.folder), str(cache.limit), *urls]
    return subprocess.Popen(command)


def test_a_killed_process_leaves_no_lock_and_no_half_file(server: Server, cache: Cache) -> None:
    process = start(cache, server.url("stall", "a"))
    assert server.stalled.wait(60)
    (partial,) = [path for path in files(cache) if path.name.endswith(PARTIAL)]
    assert partial.stat().st_size == SIZE  # its place is taken
    process.send_signal(signal.SIGKILL)
    process.wait()
    # its place is free again, and the file itself can be fetched anew
    for name in "bcd":
        assert read(cache, server.url("ok", name)) == content(name)
    assert used(cache) <= 3 * SIZE
    assert not partial.exists()


def test_several_processes_share_a_cache_too_small_for_all(server: Server, cache: Cache) -> None:
    urls = [server.url("ok", name) for name in "abcdef"]
    processes = [start(cache, *urls[turn:], *urls[:turn]) for turn in (0, 2, 4)]
    over = []
    while any(process.poll() is None for process in processes):
        if cache.folder.exists():
            total = 0
            for path in files(cache):
                try:
                    total += path.stat().st_size
                except FileNotFoundError:
                    continue
            over.append(total > 3 * SIZE)
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert used(cache) <= 3 * SIZE


def test_another_users_folder_is_refused(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.folder.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 1 + cache.folder.stat().st_uid)
    with pytest.raises(SourceError, match=r"data\.cache_dir: .* is another user's"):
        cache.fetch("http://x", Stat())
