"""`roformer shards`, whole and in parts, as a user types it."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from data_pipeline import corpus, shards
from data_pipeline.tokenizing import Encoder
from launch import meter
from launch.cli import main
from tests.conftest import make_documents


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return what writes a config whose shards go to a folder of a given name."""
    monkeypatch.setattr(shards, "UNIT_BYTES", 4000)
    monkeypatch.setattr(shards, "BUCKET_BYTES", 8000)
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 1000)
    for split, count in (("train", 60), ("eval", 7)):
        lines = [json.dumps({"text": d.text}) + "\n" for d in make_documents(count, seed=count)]
        (tmp_path / f"{split}.jsonl").write_text("".join(lines) + '{"text": " "}\n')

    def write(name: str) -> Path:
        path = tmp_path / f"{name}.yaml"
        splits = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "eval")}
        folders = {split: str(tmp_path / name / split) for split in splits}
        stage = {"name": "a", "seq_len": 8, "global_batch": 2, "steps": 1}
        content = {
            "run": {"name": name},
            "tokenizer": {"kind": "bytes"},
            "corpus": {**splits, "workers": 1},
            "data": {**folders, "lanes": 4},
            "curriculum": {"stages": [stage]},
        }
        path.write_text(yaml.safe_dump(content))
        return path

    return write


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_an_array_of_parts_and_a_merge_make_what_one_command_makes(
    config: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["shards", str(config("whole"))]) == 0
    said = capsys.readouterr().out
    assert "60 documents" in said
    assert "1.00 bytes a token, 0.000% of tokens outside the vocabulary" in said
    assert "left out: 1 blank, 0 unreadable" in said
    bars = [line for line in said.splitlines() if "tokens  ▇" in line]
    assert sum(int(line.rpartition(" ")[2]) for line in bars) == 67
    path = str(config("parts"))
    assert main(["shards", path, "--part", "1/3"]) == 0
    assert main(["shards", path, "--merge"]) == 2
    assert "units of" in capsys.readouterr().err
    for part in ("2/3", "3/3", "1/3"):  # counted from 1; then the first writes its share too
        assert main(["shards", path, "--part", part, "corpus.workers=2"]) == 0
    said = capsys.readouterr().out
    assert "every part is tokenized" in said
    assert not (tmp_path / "parts" / "train").exists()
    assert main(["shards", path, "--merge"]) == 0
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    capsys.readouterr()
    for extra in ([], ["--merge"], ["--part", "0/3"]):
        assert main(["shards", path, *extra]) == 0
        assert capsys.readouterr().out.count("is there and up to date") == 2


@pytest.mark.parametrize("share", ["", "3", "4/3", "-1/3", "1/0", "a/b", "0/0"])
def test_a_share_that_is_none_is_refused(
    share: str, config: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["shards", str(config("x")), f"--part={share}"])
    assert caught.value.code == 2
    assert "is no share: write i/n" in capsys.readouterr().err


def test_a_log_tells_how_far_it_is_and_how_fast(
    config: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meter, "SECONDS_BETWEEN_LINES", 0.0)
    assert main(["shards", str(config("logged"))]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "tokens/s" in line]
    assert any("of the text" in line for line in lines)
    assert any("written" in line for line in lines)
    counts = [int(line.split(" documents,")[0].rpartition(" ")[2]) for line in lines]
    assert max(counts) == 60


def test_a_killed_process_ends_the_command_with_a_line(
    config: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Encoder, "encode", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        assert main(["shards", str(config("killed")), "corpus.workers=2"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "one of the processes was killed" in line
    assert not (tmp_path / "killed" / "train").exists()
    assert main(["shards", str(config("killed")), "corpus.workers=2"]) == 0
    assert main(["shards", str(config("whole"))]) == 0
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
