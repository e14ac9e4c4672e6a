"""The fuzzer finds nothing in the readers, and finds what is wrong with a careless one."""

import io
import tarfile
from pathlib import Path

import pytest

from tests.fuzz import REFUSED, SAME, Archives, Shards, strike


def careless(stream, name):
    """Read as most readers do: whatever is no header is the end."""
    content = io.BytesIO(bytes(stream.read()))
    try:
        with tarfile.open(fileobj=content, errors="surrogateescape", ignore_zeros=True) as tar:
            return [(info.name, tar.extractfile(info).read()) for info in tar if info.isreg()]
    except (tarfile.TarError, EOFError):
        return []


def test_damage_is_refused_or_loses_nothing(tmp_path: Path) -> None:
    targets = [Archives(), Shards(tmp_path / "shards")]
    outcomes = {strike(number, 0, targets)[1] for number in range(600)}
    assert {REFUSED, SAME} <= outcomes


def test_a_careless_reader_is_found() -> None:
    def strike_often() -> None:
        for number in range(600):
            strike(number, 0, [Archives(careless)])

    with pytest.raises(AssertionError):
        strike_often()
