"""Checkpoints and metrics on a disk that is really full."""

import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.disks import fill, small_disk
from tests.kills import Tensors
from trainer import checkpoint
from trainer.checkpoint import SaveFailed
from trainer.config import CheckpointConfig
from trainer.distributed import World
from trainer.metrics import MetricsFile
from trainer.saving import Saver
from trainer.state import TrainState


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", mib=20) as folder:
        yield folder


@pytest.fixture
def world(tmp_path) -> Iterator[World]:
    dist.init_process_group("gloo", f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield World(0, 1, 0)
    dist.destroy_process_group()


def saver_on(disk: Path, world: World, on_error: str) -> Saver:
    settings = CheckpointConfig(keep=9, on_error=on_error)
    root, silent = disk / "checkpoints", lambda phase: None
    return Saver(root, Tensors(0), world, settings, order="", saved_step=0, pulse=silent)


def save(saver: Saver, step: int) -> None:
    saver._engine.step = step
    saver.begin(TrainState(step=step))
    saver.complete()


def folders(disk: Path) -> list[int]:
    return sorted(checkpoint.step_of(path) for path in (disk / "checkpoints").iterdir())


def test_a_save_that_finds_no_room_ends_the_run_and_leaves_the_last_one_whole(disk, world):
    saver = saver_on(disk, world, "stop")
    save(saver, 1)
    save(saver, 2)
    with pytest.raises(SaveFailed) as refused:
        save(saver, 3)  # 8 MiB each, on 20
    message = str(refused.value)
    assert message.count("\n") == 0
    assert "no checkpoint of step 3" in message
    assert "No space left on device" in message
    assert "parameters-00000-of-00001.safetensors" in message
    assert f"the last complete one is {disk / 'checkpoints' / 'step-00000002'}" in message
    assert folders(disk) == [1, 2]
    assert checkpoint.damage(disk / "checkpoints" / "step-00000002") is None
    assert Tensors.problem(checkpoint.load(disk / "checkpoints" / "step-00000002")) is None


@pytest.mark.parametrize("full", ["before the folder", "before the manifest"])
def test_training_goes_on_by_policy_and_saves_again_once_there_is_room(disk, world, caplog, full):
    saver = saver_on(disk, world, "go_on")
    save(saver, 1)
    if full == "before the folder":
        fill(disk / "ballast")
        save(saver, 2)
    else:
        saver._engine.step = 2
        saver.begin(TrainState(step=2))
        saver._saving._thread.join()
        fill(disk / "ballast")
        saver.complete()
        assert checkpoint.MANIFEST in caplog.text
    assert "no checkpoint of step 2" in caplog.text
    assert "No space left on device" in caplog.text
    assert "trains on (checkpoint.on_error=go_on)" in caplog.text
    assert folders(disk) == [1]
    assert checkpoint.damage(disk / "checkpoints" / "step-00000001") is None
    (disk / "ballast").unlink()
    save(saver, 3)
    assert checkpoint.find(disk / "checkpoints", "auto") == disk / "checkpoints" / "step-00000003"


def test_metrics_are_held_while_the_disk_is_full_and_whole_afterwards(disk, caplog):
    path = disk / "metrics.jsonl"
    with MetricsFile(path) as file:
        for step in range(1, 201):
            if step == 50:
                fill(disk / "ballast")
            if step == 150:
                (disk / "ballast").unlink()
            file.write({"step": step, "text": "x" * 100})
            whole = path.read_bytes()
            assert not whole or whole.endswith(b"\n")  # nothing is cut in two
            if step == 149:
                assert len(whole.splitlines()) < 149
    assert "held in memory" in caplog.text
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [*range(1, 201)]


def test_the_disk_is_one_that_fills(disk):
    fill(disk / "ballast")
    with pytest.raises(OSError, match="No space left") as refused:
        (disk / "more").write_bytes(b"1")
    assert refused.value.errno == errno.ENOSPC
    assert shutil.disk_usage(disk).free == 0
