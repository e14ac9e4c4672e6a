"""Zstandard as a stream of bytes."""

import io
from typing import BinaryIO

import zstandard


class ZstdStream(io.RawIOBase):
    """Zstandard frames as a stream; unlike the library's reader, it notices a cut."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._rest = b""
        self._in_frame = False
        self._output = memoryview(b"")

    def readable(self) -> bool:
        """Whether it can be read: always."""
        return True

    def readinto(self, buffer: "memoryview") -> int:  # type: ignore[override]
        """Fill `buffer` with what comes next; 0 at the end."""
        while not self._output and self._fill():
            pass
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def _fill(self) -> bool:
        """Decompress the next chunk; False at the end of the file."""
        chunk = self._rest or self._raw.read(1 << 17)
        if not chunk:
            if self._in_frame:
                raise EOFError("it ends within a frame")
            return False
        self._output = memoryview(self._frame.decompress(chunk))
        self._rest, self._in_frame = self._frame.unused_data, not self._frame.eof
        if self._frame.eof:
            self._frame = zstandard.ZstdDecompressor().decompressobj()
        return True
