import json
import shutil
from pathlib import Path

import pytest

from tests.integration.test_exactness import build_engine, start, train
from tests.ranks import run_ranks
from trainer import checkpoint
from trainer.checkpoint import (
    MANIFEST,
    Save,
    complete,
    damage,
    find,
    load,
    set_aside_after,
    step_of,
)
from trainer.distributed import World, world_from_environment
from trainer.state import TrainState


def save_three(root: Path) -> None:
    from data_pipeline.lanes import Cursor

    start()
    world = world_from_environment()
    engine = build_engine(2)
    state = TrainState(cursors={lane: Cursor(0, 0, 0, 0) for lane in range(4)})
    for step in (8, 9, 10):
        train(engine, 1, range(step, step + 1))
        state.step = step
        state.cursors[world.rank] = Cursor(step, 1, 2, 3)  # the other rank's lanes stay stale
        checkpoint.save(root, engine, state, world=world, keep=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    run_ranks(2, save_three, root)
    return root


@pytest.fixture
def root(saved, tmp_path) -> Path:
    copy = tmp_path / "checkpoints"
    shutil.copytree(saved, copy)
    return copy


def test_newest_are_kept_by_number_not_by_name(root):
    assert [path.name for path in complete(root)] == ["step-00000010", "step-00000009"]
    assert not (root / "step-00000008").exists()


def test_each_rank_tells_of_its_own_lanes(root):
    cursors = load(root / "step-00000010").state.cursors
    assert {lane: cursor.epoch for lane, cursor in cursors.items()} == {0: 10, 1: 10, 2: 0, 3: 0}


def test_manifest_names_every_file(root):
    folder = root / "step-00000010"
    files = json.loads((folder / MANIFEST).read_text())["files"]
    assert files.keys() == {path.name for path in folder.iterdir()} - {MANIFEST}
    assert len([name for name in files if name.startswith("parameters-")]) == 2
    assert damage(folder) is None


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("harm", [flip, cut, Path.unlink])
@pytest.mark.parametrize("name", ["state.json", "parameters-00001-of-00002.safetensors"])
def test_a_damaged_checkpoint_is_passed_over_aloud(root, harm, name, caplog):
    harm(root / "step-00000010" / name)
    assert find(root, "auto") == root / "step-00000009"
    assert "step-00000010" in caplog.text
    assert name in caplog.text
    with pytest.raises(ValueError, match=name):
        find(root, str(root / "step-00000010"))


def test_all_damaged_is_an_error_not_a_fresh_start(root):
    for folder in complete(root):
        flip(folder / "state.json")
    with pytest.raises(ValueError, match="every checkpoint"):
        find(root, "auto")


def test_without_a_manifest_it_is_none(root):
    (root / "step-00000010" / MANIFEST).unlink()
    assert find(root, "auto") == root / "step-00000009"


def test_resume_choices(root, tmp_path):
    assert find(root, "auto") == root / "step-00000010"
    assert find(tmp_path / "empty", "auto") is None
    assert find(tmp_path / "empty", "never") is None
    assert find(root, str(root / "step-00000009")) == root / "step-00000009"
    with pytest.raises(ValueError, match="never"):
        find(root, "never")
    with pytest.raises(ValueError, match="no complete checkpoint"):
        find(root, str(tmp_path))


def test_each_multiple_stays_on_request(saved, tmp_path):
    """The newest two, and beside them those of each multiple of 4."""

    def folder_of(step: int) -> Path:
        return root / f"step-{step:08d}"

    root = tmp_path / "checkpoints"
    for step in (8, 9, 10, 98, 99, 100):
        shutil.copytree(saved / "step-00000010", folder_of(step))
    (folder_of(100) / MANIFEST).unlink()
    save = Save.__new__(Save)
    save.folder, save.step = folder_of(100), 100
    assert save._complete([], keep=2, keep_every=4) is None
    assert [step_of(path) for path in complete(root)] == [100, 99, 8]


def test_later_ones_are_set_aside_when_an_earlier_one_is_gone_on_from(root):
    (moved,) = set_aside_after(root, 9)
    assert moved.name.startswith("step-00000010.aside-")
    assert (moved / MANIFEST).exists()  # nothing of it is lost
    assert complete(root) == [root / "step-00000009"]


def test_a_path_is_where_a_run_begins_and_not_where_it_goes_on(root, tmp_path):
    own = tmp_path / "own"
    assert find(own, str(root / "step-00000009")) == root / "step-00000009"
    shutil.copytree(root / "step-00000009", own / "step-00000012")
    assert find(own, str(root / "step-00000009")) == own / "step-00000012"
    assert find(root, str(root / "step-00000009")) == root / "step-00000009"  # its own: goes back


def test_a_look_at_sizes_sees_no_flipped_byte_and_a_full_one_does(root):
    flip(root / "step-00000010" / "state.json")
    assert damage(root / "step-00000010", in_full=False) is None
    assert damage(root / "step-00000010") is not None
    cut(root / "step-00000010" / "state.json")
    assert damage(root / "step-00000010", in_full=False) is not None


@pytest.mark.parametrize("error", [MemoryError("no room for a copy"), SystemExit(3)])
def test_what_ends_the_writing_unforeseen_is_raised_and_nothing_is_completed(
    tmp_path, monkeypatch, error
):
    def fail(*_):
        raise error

    monkeypatch.setattr(checkpoint, "save_file", fail)
    folder = tmp_path / "step-00000003"
    folder.mkdir()
    saving = Save(folder, {}, {"step": 3}, World(rank=0, size=1, local_rank=0), 0.0)
    with pytest.raises(type(error)) as raised:
        saving.finish(keep=1)
    assert raised.value is error
    assert complete(tmp_path) == []
