"""Bad input: one line a problem, exit code 2, soon, and nothing left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launch.cli import main
from launch.spawn import train_here
from tests.conftest import WORDS


def problems(capsys, *arguments) -> list[str]:
    """Run a command that must be refused; return its lines on stderr."""
    assert main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said
    assert all(line.startswith("roformer: error: ") for line in said), said
    return [line.removeprefix("roformer: error: ") for line in said]


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture
def corpus(tmp_path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.txt").write_text("\n".join(WORDS * 8) + " ".join(WORDS))
    return folder


@pytest.fixture
def building(tmp_path, corpus) -> Path:
    """Return a config that builds a tokenizer and shards of five documents."""
    path = tmp_path / "build.yaml"
    config = {
        "run": {"name": "r", "dir": str(tmp_path / "runs")},
        "tokenizer": {"model": str(tmp_path / "t.model"), "vocab_size": 290},
        "corpus": {"train": str(corpus), "workers": 1},
        "data": {"train": str(tmp_path / "shards"), "lanes": 2},
        "curriculum": {"stages": [{"name": "a", "seq_len": 8, "global_batch": 2, "steps": 1}]},
        "tracking": {"mlflow": {"uri": None}},
    }
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize("command", ["tokenizer", "shards"])
def test_missing_and_empty_corpus(building, tmp_path, capsys, command):
    kind = ["tokenizer.kind=bytes"] if command == "shards" else []
    before = tree(tmp_path)
    nowhere = tmp_path / "nowhere"
    (line,) = problems(capsys, command, building, f"corpus.train={nowhere}", *kind)
    assert str(nowhere) in line
    (line,) = problems(capsys, command, building, "corpus.train=[]", *kind)
    assert "corpus.train" in line
    assert tree(tmp_path) == before
    blank = tmp_path / "blank.txt"
    blank.write_text(" \n\n")
    (line,) = problems(capsys, command, building, f"corpus.train={blank}", *kind)
    assert "empty" in line or "no document" in line
    blank.unlink()
    assert tree(tmp_path) == before


def test_vocabulary_larger_than_the_text_allows(building, tmp_path, capsys):
    before = tree(tmp_path)
    (line,) = problems(capsys, "tokenizer", building, "tokenizer.vocab_size=9000")
    assert "9000" in line
    assert tree(tmp_path) == before


def test_fewer_documents_than_lanes(building, tmp_path, capsys):
    before = tree(tmp_path)
    (line,) = problems(capsys, "shards", building, "data.lanes=6", "tokenizer.kind=bytes")
    assert "5" in line
    assert "6" in line
    assert tree(tmp_path) == before


def test_what_was_made_is_kept_or_refused_but_never_replaced(building, tmp_path, capsys):
    assert main(["tokenizer", str(building)]) == 0
    assert main(["shards", str(building)]) == 0
    capsys.readouterr()
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "shards").iterdir()}
    assert main(["tokenizer", str(building)]) == 0
    assert main(["shards", str(building)]) == 0
    assert capsys.readouterr().out.count("up to date") == 2
    (line,) = problems(capsys, "tokenizer", building, "tokenizer.vocab_size=288")
    assert "remove it" in line
    (line,) = problems(capsys, "shards", building, "run.seed=4")
    assert "remove it" in line
    model = tmp_path / "t.model"
    whole = model.read_bytes()
    model.write_bytes(whole[:-20])
    (line,) = problems(capsys, "tokenizer", building)
    assert f"{model} is no " in line
    model.write_bytes(whole)
    (tmp_path / "t.model.made_from.json").unlink()
    assert main(["tokenizer", str(building)]) == 0
    assert "kept: it was not trained here" in capsys.readouterr().out
    (line,) = problems(capsys, "tokenizer", building, "tokenizer.kind=bpe")
    assert "has kind unigram" in line
    model.unlink()
    (line,) = problems(capsys, "tokenizer", building, "tokenizer.vocab_size=null")
    assert "vocab_size is null" in line
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "shards").iterdir()} == times


def test_verify_finds_damage(building, tmp_path, capsys):
    assert main(["shards", str(building), "tokenizer.kind=bytes"]) == 0
    assert main(["verify", str(tmp_path / "shards")]) == 0
    shard = next((tmp_path / "shards").glob("*.tar"))
    data = bytearray(shard.read_bytes())
    data[700] ^= 1
    shard.write_bytes(data)
    assert main(["verify", str(tmp_path / "shards")]) == 1
    assert shard.name in capsys.readouterr().out
    assert problems(capsys, "verify", tmp_path / "nowhere")
    # without an index, the structure tells
    (tmp_path / "shards" / "index.json").unlink()
    assert main(["verify", str(tmp_path / "shards")]) == 0
    shard.write_bytes(data[:-11_000])
    assert main(["verify", f"{tmp_path}/shards/*.tar"]) == 1
    assert "cut at byte" in capsys.readouterr().out
    assert problems(capsys, "verify", f"{tmp_path}/shards/x*.tar")


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.train=NOWHERE", "NOWHERE"),
        ("data.train=", "data.train"),
        ("data.workers=3", "8 lanes don't divide over 1 ranks x 3 loader workers"),
        ("tokenizer.kind=unigram tokenizer.model=gone.model", "gone.model"),
        ("engine.precision=fp16", "fp16 needs a GPU"),
        ("checkpoint.resume=nowhere", "checkpoint.resume=nowhere"),
        ("run.dir=FILE/runs", "no folder that can be written to"),
    ],
)
def test_runs_that_cannot_start(tiny_config, tmp_path, capsys, command, override, said):
    file = tmp_path / "FILE"
    file.write_text("")
    before = tree(tmp_path)
    override = override.replace("FILE", str(file))
    lines = problems(capsys, command, tiny_config, *override.split())
    assert len(lines) == 1
    assert said in lines[0]
    assert tree(tmp_path) == before


def test_compiling_without_a_compiler(tiny_config, capsys, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    (line,) = problems(capsys, "train", tiny_config, "engine.compile=true")
    assert "engine.compile" in line
    assert "C++ compiler" in line


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--stage=middle", "--stage middle: the curriculum has"),
        ("--steps=0", "--steps 0: at least 1"),
        ("--trace=FILE/trace.json", "no folder that can be written to"),
    ],
)
def test_profiles_that_cannot_start(tiny_config, tmp_path, capsys, option, said):
    file = tmp_path / "FILE"
    file.write_text("")
    (line,) = problems(capsys, "profile", tiny_config, option.replace("FILE", str(file)))
    assert said in line


def test_another_tokenizer_than_the_shards(building, tiny_config, capsys, tmp_path):
    assert main(["tokenizer", str(building)]) == 0
    capsys.readouterr()
    tokenizer = [f"tokenizer.model={tmp_path / 't.model'}", "tokenizer.kind=unigram"]
    (line,) = problems(capsys, "train", tiny_config, *tokenizer)
    assert "has vocab_size 290, and the config says tokenizer.vocab_size=8000" in line
    lines = problems(capsys, "train", tiny_config, *tokenizer, "tokenizer.vocab_size=null")
    assert len(lines) == 2  # train and eval
    assert all("another tokenizer" in line for line in lines)


def test_everything_that_stops_a_run_is_said_at_once(tiny_config, capsys):
    lines = problems(
        capsys,
        "train",
        tiny_config,
        "data.eval=NOWHERE",
        "data.train=GONE",
        "engine.precision=fp16",
    )
    assert len(lines) == 3


def test_a_name_that_is_another_run(tiny_config, tiny_shards, tmp_path, capsys):
    from configs.loader import load
    from launch.preflight import fingerprints, prepare
    from launch.run_folder import open_folder

    data = json.loads((tiny_shards / "train" / "index.json").read_text())
    prepared = prepare(load(tiny_config), 1)
    assert prepared.train.sources[0].tokens == data["tokens"]
    open_folder(prepared.config, fingerprints(prepared.tokenizer, prepared.train, prepared.eval))
    before = tree(tmp_path)
    (line,) = problems(capsys, "train", tiny_config, "model.num_layers=3")
    assert "model.num_layers: 2 before, 3 now" in line
    assert "choose another run.name" in line
    assert tree(tmp_path) == before


def test_other_weights_of_the_same_sources_are_another_run(tiny_config, tiny_shards, capsys):
    from configs.loader import load
    from launch.preflight import fingerprints, prepare
    from launch.run_folder import open_folder

    def weighed(*weights: float) -> str:
        shards = tiny_shards / "train"
        pairs = zip("ab", weights, strict=True)
        sources = (f"{{name: {name}, shards: {shards}, weight: {w}}}" for name, w in pairs)
        return f"data.train=[{', '.join(sources)}]"

    def begin(*overrides: str) -> None:
        prepared = prepare(load(tiny_config, overrides), 1)
        facts = fingerprints(prepared.tokenizer, prepared.train, prepared.eval)
        open_folder(prepared.config, facts)

    begin(weighed(1, 3))
    begin(weighed(2, 6))  # the same shares
    (line,) = problems(capsys, "train", tiny_config, weighed(1, 2))
    assert "'shares': {'a': 0.25, 'b': 0.75}" in line
    assert "checkpoint.allow_changes=[data]" in line
    begin(weighed(1, 2), "checkpoint.allow_changes=[data]")


def test_a_run_that_is_being_trained_is_left_alone(tiny_config, tmp_path, capsys):
    from launch.run_folder import lock_folder

    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    with lock_folder(folder):
        (line,) = problems(capsys, "train", tiny_config)
    assert "being trained by another process" in line
    lock_folder(folder).close()  # and free again


def test_the_ranks_of_one_start_may_ask_for_the_folder_at_once(tiny_config, tmp_path):
    from configs.loader import load
    from launch.run_folder import folder_problems, lock_folder

    folder, config = tmp_path / "runs" / "tiny", load(tiny_config, [])
    folder.mkdir(parents=True)
    with lock_folder(folder, shared=True):  # another rank asks
        assert list(folder_problems(config)) == []
        with pytest.raises(ValueError, match="another process"):
            lock_folder(folder)
    with lock_folder(folder):
        (line,) = folder_problems(config)
        assert "another process" in line


def test_shards_of_another_size_than_the_index_says(building, tiny_config, tmp_path, capsys):
    assert main(["shards", str(building), "tokenizer.kind=bytes"]) == 0
    capsys.readouterr()
    cut, gone = sorted((tmp_path / "shards").glob("*.tar"))[:2]
    cut.write_bytes(cut.read_bytes()[:-512])
    gone.unlink()
    data = [f"data.train={tmp_path / 'shards'}", "data.lanes=2"]
    before = tree(tmp_path)
    lines = problems(capsys, "train", tiny_config, *data)
    assert len(lines) == 2
    assert any(str(cut) in line and "index says" in line for line in lines)
    assert any(str(gone) in line and "missing" in line for line in lines)
    assert tree(tmp_path) == before
    assert main(["plan", str(tiny_config), *data]) == 2


def test_places_that_cannot_be_written_to_are_named_before_the_work(building, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    (line,) = problems(capsys, "tokenizer", building, f"tokenizer.model={file}/t.model")
    assert line.startswith(f"tokenizer.model: {file} is no folder")
    (line,) = problems(capsys, "tokenizer", building, f"tokenizer.model={tmp_path}")
    assert "name a file" in line
    bytes_to_file = [f"data.train={file}/shards", "tokenizer.kind=bytes"]
    (line,) = problems(capsys, "shards", building, *bytes_to_file)
    assert line.startswith(f"data.train: {file} is no folder")


def test_arms_that_would_not_be_paired(tiny_config, capsys):
    arms = "compare.arms={a: [model.positions=rope], b: [data.lanes=4, run.seed=2]}"
    lines = problems(capsys, "compare", tiny_config, arms)
    assert len(lines) == 2
    assert all("would unpair the arms" in line for line in lines)


def test_a_refusal_takes_less_than_ten_seconds(tiny_config):
    before = os.times()  # processor time: other work on the machine is of no account
    command = [sys.executable, "-m", "launch.cli", "train", str(tiny_config), "data.train=NOWHERE"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    after = os.times()
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    spent = after.children_user + after.children_system
    assert spent - before.children_user - before.children_system < 10


def test_help_everywhere(capsys):
    for command in ([], *[[name] for name in ("tokenizer", "train", "compare", "report")]):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--help"])
        assert ended.value.code == 0
        assert "usage: roformer" in capsys.readouterr().out
    assert callable(train_here)
