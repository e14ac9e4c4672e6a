"""Where bytes come from: local files, http(s), s3, gs (fsspec) and the output of a command.

    chunks(url)   the bytes of a source, in order, whole or an error that says where they ended
    stat(url)     size and version, to know later that it is the same source still
    expand(name)  a name with braces or a pattern, as the sources that it names

A connection that fails, stalls or ends too soon is taken up again where it was, by range, after a
pause that doubles. What is wrong for good (404, no right to read) is said at once. No message
holds a credential.
"""

import glob
import os
import re
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from braceexpand import UnbalancedBracesError, braceexpand  # type: ignore[attr-defined]

T = TypeVar("T")

CHUNK = 1 << 20
RANGE = 8 << 20  # bytes that one request asks an object store for
PIPE = "pipe:"
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
"""Answers of http that another try may change."""
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
"""Schemes that need a package of an optional group."""
SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
SECRET = re.compile(
    r"(authorization:\s*\w+\s+|(?:token|password|passwd|secret|signature|[a-z_-]*key)\s*[=: ]\s*)"
    r"[^\s'\"&|;]+",
    re.IGNORECASE,
)
URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\s'\"|;<>]+", re.IGNORECASE)


class SourceError(ValueError):
    """A source that cannot be read; one line that names it, without its credentials."""


class _Transient(Exception):
    """What another try may change."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a source is waited for."""

    connect_s: float = 10.0
    read_s: float = 60.0
    """Longest wait for the next bytes."""
    retries: int = 5
    """Tries after the first, counted anew whenever bytes have come."""
    pause_s: float = 0.5
    """Before the first of them; doubles, up to half a minute."""

    def pause(self, failures: int) -> None:
        """Wait before the next try."""
        time.sleep(min(self.pause_s * 2 ** (failures - 1), 30.0))


PATIENT = Patience()


@dataclass(frozen=True, slots=True)
class Stat:
    """What a source says of itself."""

    size: int | None = None
    """Bytes, where it tells."""
    version: str = ""
    """Another one where its content is another: a time, an entity tag."""


def is_remote(url: str) -> bool:
    """Whether `url` is no local file."""
    return url.startswith(PIPE) or SCHEME.match(url) is not None


def redacted(url: str) -> str:
    """Return `url` (or a command) for messages: user names, passwords, queries left out."""
    if url.startswith(PIPE):
        return PIPE + _secretless(url[len(PIPE) :])
    if not is_remote(url):
        return url
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))


def expand(name: str, patience: Patience = PATIENT) -> list[str]:
    """Return the sources that `name` stands for: braces in order, a pattern's matches by name.

    Raises:
        SourceError: If a pattern matches nothing, or the braces are broken.
    """
    if os.path.exists(name):
        return [name]
    try:
        names = list(braceexpand(name, escape=False)) if "{" in name else [name]
    except UnbalancedBracesError:
        if not name.startswith(PIPE):  # a command may have its own use for a brace
            raise SourceError(f"{redacted(name)}: its braces are not balanced") from None
        names = [name]
    return [url for part in names for url in _matches(part, patience)]


def _matches(name: str, patience: Patience) -> list[str]:
    is_http = name.startswith(("http://", "https://"))
    if name.startswith(PIPE) or is_http or not glob.has_magic(name):
        return [name]
    if not is_remote(name):
        found = sorted(glob.glob(name, recursive=True))
    else:
        fs, path = _filesystem(name, patience)
        found = sorted(
            fs.unstrip_protocol(match) for match in _asked(name, patience, lambda: fs.glob(path))
        )
    if not found:
        raise SourceError(f"{redacted(name)}: no file matches")
    return found


def stat(url: str, patience: Patience = PATIENT) -> Stat:
    """Ask a source for its size and version; a command is not run for it."""
    if url.startswith(PIPE):
        return Stat()
    if not is_remote(url):
        status = os.stat(url)
        return Stat(status.st_size, str(status.st_mtime_ns))
    if url.startswith(("http://", "https://")):
        return _asked(url, patience, lambda: _http_stat(url, patience))
    fs, path = _filesystem(url, patience)
    facts = _asked(url, patience, lambda: fs.info(path))
    version = facts.get("ETag") or facts.get("etag") or facts.get("LastModified") or ""
    return Stat(facts.get("size"), str(version))


def chunks(
    url: str, patience: Patience = PATIENT, size: int | None = None
) -> Generator[bytes, None, None]:
    """Yield a source's bytes; `size` is how many there must be, where that is known.

    Raises:
        SourceError: Which names the source, the byte and the reason.
    """
    opened, failures, place = _opener(url, patience), 0, 0
    while True:
        try:
            with closing(opened(place)) as stream:
                for chunk in stream:
                    place += len(chunk)
                    failures = 0
                    yield chunk
            if size is not None and place < size:
                raise _Transient(f"it ended there, and has {size} bytes")
            break
        except _Transient as error:
            failures += 1
            if failures > patience.retries or url.startswith(PIPE) or not is_remote(url):
                tries = f" ({failures} tries)" if failures > 1 else ""
                raise SourceError(f"{redacted(url)}: byte {place}: {error}{tries}") from None
            patience.pause(failures)
    if size is not None and place > size:
        raise SourceError(f"{redacted(url)}: has more than its {size} bytes")


def _opener(url: str, patience: Patience) -> Callable[[int], Generator[bytes, None, None]]:
    """Return what reads a source from a byte on."""
    if url.startswith(PIPE):
        return lambda place: _pipe_chunks(url, patience)
    if not is_remote(url):
        return lambda place: _file_chunks(url)
    if url.startswith(("http://", "https://")):
        seen: dict[str, str] = {}  # the entity tag, which must not change between two tries
        return lambda place: _http_chunks(url, patience, place, seen)
    return lambda place: _object_chunks(url, patience, place)


def _asked(url: str, patience: Patience, ask: Callable[[], T]) -> T:
    """Return what `ask` gives, tried again where that may help."""
    for failures in range(1, patience.retries + 2):
        try:
            return ask()
        except _Transient as error:
            reason = error
        except SourceError:
            raise
        except Exception as error:
            if (said := _final(error)) is not None:
                raise SourceError(f"{redacted(url)}: {said}") from None
            reason = _Transient(_first_line(error))
        if failures <= patience.retries:
            patience.pause(failures)
    raise SourceError(f"{redacted(url)}: {reason} ({patience.retries + 1} tries)")


# -- local files and commands --------------------------------------------------------------------


def _file_chunks(path: str) -> Generator[bytes, None, None]:
    if not os.path.isfile(path):
        raise SourceError(f"{path}: the shard is missing")
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            yield chunk


def _pipe_chunks(url: str, patience: Patience) -> Generator[bytes, None, None]:
    """Yield what a command writes; every part of its last pipeline must end with status 0."""
    read_end, write_end = os.pipe()
    said = tempfile.TemporaryFile()
    script = f'set -o pipefail\n{url[len(PIPE) :]}\necho "${{PIPESTATUS[@]}}" >&{write_end}'
    process = subprocess.Popen(
        ["bash", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=said,
        pass_fds=(write_end,),
        start_new_session=True,
        bufsize=0,
    )
    os.close(write_end)
    assert process.stdout is not None
    place = 0
    try:
        while True:
            if not select.select([process.stdout], [], [], patience.read_s)[0]:
                raise SourceError(
                    f"{redacted(url)}: byte {place}: nothing more came in {patience.read_s:g} s"
                )
            chunk = process.stdout.read(CHUNK)
            if not chunk:
                break
            place += len(chunk)
            yield chunk
        try:
            code = process.wait(patience.read_s)
        except subprocess.TimeoutExpired:
            raise SourceError(f"{redacted(url)}: byte {place}: does not end") from None
        statuses = os.read(read_end, 1000).decode().split() or [str(code)]
        if any(status != "0" for status in statuses):
            said.seek(0)
            lines = said.read(1 << 16).decode(errors="replace").split("\n")
            reason = next((f": {_secretless(line)}" for line in lines if line.strip()), "")
            raise SourceError(
                f"{redacted(url)}: byte {place}: exit status {' | '.join(statuses)}{reason}"
            )
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()
        os.close(read_end)
        said.close()


# -- http ----------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _session(process: int) -> Any:
    """Return this process's connections, kept open between requests."""
    import requests

    session = requests.Session()
    session.headers["Accept-Encoding"] = "identity"
    adapter = requests.adapters.HTTPAdapter(pool_maxsize=16)
    session.mount("http://", adapter)
    session.mount("https://", adapter)
    return session


def _http_answer(url: str, patience: Patience, headers: dict[str, str]) -> Any:
    """Return an answer without an error's status, its body unread."""
    import requests

    try:
        answer = _session(os.getpid()).get(
            url,
            headers=headers,
            stream=True,
            timeout=(patience.connect_s, patience.read_s),
        )
    except (requests.ConnectionError, requests.Timeout) as error:
        raise _Transient(_reason(error, patience)) from None
    except requests.RequestException as error:
        raise SourceError(f"{redacted(url)}: {type(error).__name__}") from None
    if answer.ok:
        return answer
    answer.close()
    said = f"HTTP {answer.status_code} {answer.reason or ''}".strip()
    if answer.status_code in TRANSIENT:
        raise _Transient(said)
    hint = (
        "; are the credentials right and not expired?" if answer.status_code in (401, 403) else ""
    )
    raise SourceError(f"{redacted(url)}: {said}{hint}")


def _http_stat(url: str, patience: Patience) -> Stat:
    # No HEAD: what is signed for reading may refuse it.
    with closing(_http_answer(url, patience, {})) as answer:
        size = answer.headers.get("Content-Length", "")
        version = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        return Stat(int(size) if size.isdigit() else None, version)


def _http_chunks(
    url: str, patience: Patience, place: int, seen: dict[str, str]
) -> Generator[bytes, None, None]:
    """Yield a body from byte `place` on."""
    from urllib3.exceptions import HTTPError

    headers = {"Range": f"bytes={place}-"} if place else {}
    if place and seen.get("ETag"):
        headers["If-Range"] = seen["ETag"]
    with closing(_http_answer(url, patience, headers)) as answer:
        tag = answer.headers.get("ETag", "")
        if seen.setdefault("ETag", tag) != tag:
            raise SourceError(f"{redacted(url)}: byte {place}: it changed while it was read")
        skipped = place  # where the server knows no ranges, it sends all of it again
        if answer.status_code == 206:
            start = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", ""))
            if start is None or int(start[1]) != place:
                raise SourceError(f"{redacted(url)}: byte {place}: the server gave another range")
            skipped = 0
        try:
            # read1: what has come is kept where the rest does not
            while chunk := answer.raw.read1(CHUNK, decode_content=False):
                part = chunk[skipped:]
                skipped -= len(chunk) - len(part)
                if part:
                    yield part
        except (HTTPError, OSError) as error:
            raise _Transient(_reason(error, patience)) from None


def _reason(error: Exception, patience: Patience) -> str:
    """Say in a few words why a connection failed; the library's own text holds the whole URL."""
    name = type(error).__name__
    if "ConnectTimeout" in name:
        return f"no connection in {patience.connect_s:g} s"
    if "Timeout" in name or "timed out" in str(error).lower():
        return f"nothing more came in {patience.read_s:g} s"
    if "refused" in str(error):
        return "connection refused"
    if "resolve" in str(error).lower():
        return "the host's name cannot be resolved"
    return "the connection broke"


# -- object stores -------------------------------------------------------------------------------


def _filesystem(url: str, patience: Patience) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it."""
    import fsspec

    scheme = url.partition("://")[0].lower()
    options: dict[str, Any] = {}
    if scheme in ("s3", "s3a"):
        limits = {"connect_timeout": patience.connect_s, "read_timeout": patience.read_s}
        options = {"config_kwargs": limits, "use_listings_cache": False}
    try:
        return fsspec.url_to_fs(url, **options)
    except ImportError:
        extra = EXTRAS.get(scheme)
        remedy = f"pip install 'roformer-pretraining[{extra}]'" if extra else "its fsspec package"
        raise SourceError(f"{redacted(url)}: {scheme}:// needs {remedy}") from None
    except ValueError as error:
        raise SourceError(f"{redacted(url)}: {_first_line(error)}") from None


def _object_chunks(url: str, patience: Patience, place: int) -> Generator[bytes, None, None]:
    """Yield an object from byte `place` on, a range a request."""
    fs, path = _filesystem(url, patience)

    def bounded(function: Callable[..., T], *arguments: Any) -> T:
        try:
            return _within(patience.connect_s + patience.read_s, function, *arguments)
        except Exception as error:
            if (said := _final(error)) is not None:
                raise SourceError(f"{redacted(url)}: byte {place}: {said}") from None
            raise _Transient(_first_line(error)) from None

    file = bounded(lambda: fs.open(path, "rb", cache_type="none", block_size=RANGE))
    with closing(file):
        file.seek(place)
        while chunk := bounded(file.read, RANGE):
            place += len(chunk)
            yield chunk


def _within(seconds: float, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that may never return; give up on it after a time."""
    answer: list[Any] = []

    def call() -> None:
        try:
            answer.append((function(*arguments), None))
        except Exception as error:
            answer.append((None, error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answer:
        raise TimeoutError(f"nothing more came in {seconds:g} s")
    result, error = answer[0]
    if error is not None:
        raise error
    return result


def _final(error: Exception) -> str | None:
    """Say what is wrong for good, None where another try may help."""
    if isinstance(error, FileNotFoundError):
        return "does not exist"
    if isinstance(error, PermissionError) or "credential" in type(error).__name__.lower():
        return "no right to read it; are the credentials right and not expired?"
    return None


def _first_line(error: Exception) -> str:
    """Return an error's first line, without what may be secret in it."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return _secretless(line)


def _secretless(text: str) -> str:
    return SECRET.sub(r"\1***", URL.sub(lambda match: redacted(match[0]), text))[:300]
