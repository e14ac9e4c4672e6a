import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry as fsspec_classes

from data_pipeline.sources import (
    Patience,
    SourceError,
    Stat,
    chunks,
    expand,
    redacted,
    stat,
)
from tests.data_pipeline.server import FLAKY_BYTES, Server, serving

HASTY = Patience(connect_s=2.0, read_s=0.3, retries=2, pause_s=0.01)
CONTENT = os.urandom(300_000)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "a.tar").write_bytes(CONTENT)
    with serving(tmp_path) as server:
        yield server


def read(url: str, size: int | None = None) -> bytes:
    return b"".join(chunks(url, HASTY, size))


def refused(url: str, size: int | None = None) -> str:
    """Return the one line that says why `url` cannot be read; no credential is in it."""
    with pytest.raises(SourceError) as caught:
        read(url, size)
    said = str(caught.value)
    assert "\n" not in said
    assert "hunter" not in said
    return said


@pytest.mark.parametrize("fault", ["ok", "plain", "flaky", "norange", "busy"])
def test_what_another_try_can_mend_is_read_whole(server: Server, fault: str) -> None:
    assert read(server.url(fault, "a.tar")) == CONTENT


def test_a_broken_connection_goes_on_where_it_was(server: Server) -> None:
    assert read(server.url("flaky", "a.tar")) == CONTENT
    assert server.sent["/flaky/a.tar"] == len(CONTENT)
    assert server.requests["/flaky/a.tar"] == -(-len(CONTENT) // FLAKY_BYTES)


@pytest.mark.parametrize(
    ("fault", "message", "requests"),
    [
        ("404", r"HTTP 404", 1),
        ("expired-credentials", r"HTTP 403 .*credentials right and not expired", 1),
        ("changing", r"byte 150000: it changed while it was read", 2),
        ("stall", r"byte \d+: nothing more came in 0.3 s \(\d tries\)", None),
    ],
)
def test_what_cannot_be_mended_is_one_line(
    server: Server, fault: str, message: str, requests: int | None
) -> None:
    started = time.monotonic()
    said = refused(server.url(fault, "a.tar"))
    assert time.monotonic() - started < 5
    assert said.startswith(server.shown(fault, "a.tar"))
    assert re.search(message, said)
    assert requests is None or server.requests[f"/{fault}/a.tar"] == requests


def test_a_body_that_is_short_each_time_is_short(server: Server) -> None:
    # half of what is left each time: it gets nearer, and never there
    said = refused(server.url("closedelimited", "a.tar"), size=len(CONTENT))
    assert f"it ended there, and has {len(CONTENT)} bytes" in said


def test_a_size_that_is_known_is_held(server: Server) -> None:
    assert read(server.url("plain", "a.tar"), len(CONTENT)) == CONTENT
    assert "more than its 1000 bytes" in refused(server.url("ok", "a.tar"), 1000)


def test_nobody_listens() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    said = refused(f"http://127.0.0.1:{port}/a.tar")
    assert said == f"http://127.0.0.1:{port}/a.tar: byte 0: connection refused (3 tries)"


def test_a_source_tells_its_size_and_version(server: Server, tmp_path: Path) -> None:
    assert stat(server.url("ok", "a.tar"), HASTY) == Stat(len(CONTENT), '"1"')
    assert stat(server.url("plain", "a.tar"), HASTY) == Stat()
    assert stat(str(tmp_path / "a.tar")).size == len(CONTENT)
    assert stat("pipe:false") == Stat()


# -- commands ------------------------------------------------------------------------------------


def test_a_command_is_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(CONTENT)
    assert read(f"pipe:cat {tmp_path}/a.tar | cat") == CONTENT
    assert read(f"pipe:if false; then exit 3; fi; cat {tmp_path}/a.tar") == CONTENT


@pytest.mark.parametrize(
    ("command", "statuses"),
    [
        ("false | cat", "1 | 0"),
        ("echo x | (cat; exit 3)", "0 | 3"),
        ("echo x; exit 7", "7"),
        ("yes | head -c 5", "141 | 0"),  # what was cut off is no success
        ("kill -9 $$", "-9"),
        ("false | true && echo x", "1 | 0"),  # not only of the last pipeline
        ("false | true; echo x", "1 | 0"),
        ("x=$(false | true); echo x", "1"),
    ],
)
def test_the_status_of_every_part_of_a_command_counts(command: str, statuses: str) -> None:
    said = refused(f"pipe:{command}")
    assert f"exit status {statuses}" in said


def test_a_commands_own_words_are_told_without_secrets() -> None:
    said = refused(
        "pipe:echo no token=hunter2 for https://me:hunter2@host/x?key=hunter3 >&2; false"
    )
    assert said.endswith("no token=*** for https://host/x")


def test_a_command_that_stalls_is_ended(tmp_path: Path) -> None:
    said = refused(f"pipe:echo x; echo $$ > {tmp_path}/pid; sleep 60")
    assert "byte 2: nothing more came in 0.3 s" in said
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


# -- names ---------------------------------------------------------------------------------------


def test_names_with_braces_and_patterns(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        (tmp_path / f"s-{number:02d}.tar").touch()
    files = [f"{tmp_path}/s-{number:02d}.tar" for number in range(3)]
    assert expand(f"{tmp_path}/s-{{02..00}}.tar") == files[::-1]
    assert expand(f"{tmp_path}/s-*.tar") == files
    assert expand(f"{tmp_path}/{{s-0[01],s-02}}.tar") == files
    assert expand("https://h/{a,b}.tar?x=*") == ["https://h/a.tar?x=*", "https://h/b.tar?x=*"]
    assert expand("pipe:cat {1..2}.tar") == ["pipe:cat 1.tar", "pipe:cat 2.tar"]
    assert expand("pipe:awk '{print $1}' x") == ["pipe:awk '{print $1}' x"]
    odd = tmp_path / "odd{1,2}[x].tar"
    odd.touch()
    assert expand(str(odd)) == [str(odd)]
    with pytest.raises(SourceError, match="no file matches"):
        expand(f"{tmp_path}/nothing-*.tar")
    with pytest.raises(SourceError, match="braces are not balanced"):
        expand(f"{tmp_path}/{{a.tar")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://u:p@h:1/a.tar?sig=x#y", "https://h:1/a.tar"),
        ("s3://key:secret@bucket/a.tar", "s3://bucket/a.tar"),
        (
            "pipe:curl -H 'Authorization: Bearer abc' https://u:p@h/a?b=c | gunzip",
            "pipe:curl -H 'Authorization: Bearer ***' https://h/a | gunzip",
        ),
        ("pipe:get --password hush --api-key=hush x", "pipe:get --password *** --api-key=*** x"),
        ("/local/a?b.tar", "/local/a?b.tar"),
    ],
)
def test_messages_tell_no_credentials(url: str, shown: str) -> None:
    assert redacted(url) == shown


# -- object stores, by fsspec's own file system in memory ----------------------------------------


@pytest.fixture
def bucket() -> Iterator[MemoryFileSystem]:
    fs = fsspec.filesystem("memory")
    for name in ("a", "b"):
        fs.pipe(f"/bucket/{name}.tar", CONTENT)
    yield fs
    fs.rm("/bucket", recursive=True)


def test_an_object_is_read_by_ranges(bucket: MemoryFileSystem, monkeypatch) -> None:
    monkeypatch.setattr("data_pipeline.sources.RANGE", 70_000)
    assert expand("memory://bucket/*.tar") == ["memory:///bucket/a.tar", "memory:///bucket/b.tar"]
    assert stat("memory://bucket/a.tar", HASTY).size == len(CONTENT)
    parts = list(chunks("memory://bucket/a.tar", HASTY))
    assert b"".join(parts) == CONTENT
    assert [len(part) for part in parts] == [70_000] * 4 + [20_000]
    assert refused("memory://bucket/c.tar").endswith(
        "memory://bucket/c.tar: byte 0: does not exist"
    )


def test_an_object_store_that_fails_is_tried_again(bucket: MemoryFileSystem, monkeypatch) -> None:
    calls = []
    really = MemoryFileSystem._open

    def flaky(self, path, *args, **kwargs):
        calls.append(path)
        if len(calls) < 3:
            raise OSError("Slow Down: token=hunter2")
        return really(self, path, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "_open", flaky)
    assert read("memory://bucket/a.tar") == CONTENT
    monkeypatch.setattr(MemoryFileSystem, "_open", lambda *a, **k: time.sleep(60))
    hasty = Patience(connect_s=0.05, read_s=0.05, retries=1, pause_s=0.01)
    with pytest.raises(SourceError, match=r"nothing more came in 0\.1 s \(2 tries\)"):
        list(chunks("memory://bucket/a.tar", hasty))


def test_a_scheme_without_its_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(fsspec_classes, "gs", raising=False)  # a test of gs has imported it
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert "pip install 'roformer-pretraining[gs]'" in refused("gs://bucket/a.tar")
