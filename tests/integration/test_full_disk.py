"""Runs whose disk is really full: at the start, during saves, and all the time for a while."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disks import small_disk
from tests.faults import Fault, Plan
from tests.integration.processes import read_records, roformer
from tests.integration.test_faults import checkpoints, start
from trainer.checkpoint import damage

pytestmark = pytest.mark.xdist_group("faults")


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", mib=16) as folder:
        yield folder


def test_a_start_on_a_full_disk_ends_with_a_line(tiny_config, tmp_path):
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    (folder / ".config.yaml.tmp").symlink_to("/dev/full")  # what the run writes there has no room
    done = roformer("train", tiny_config)
    assert done.returncode == 1
    assert f"{folder}: No space left on device; make room; " in done.stdout.splitlines()[-1]
    assert "Traceback" not in done.stdout


@pytest.mark.long
def test_a_full_disk_ends_the_run_with_a_line_and_it_goes_on_once_there_is_room(disk, tiny_config):
    plan = Plan(disk / "marks", (Fault("fill", rank=0, step=8, phase="save"),))
    run = f"run.dir={disk / 'runs'}"
    full = start(plan, tiny_config, run)
    plan.check()
    folder = disk / "runs" / "tiny"
    assert full.returncode == 1
    last = full.stdout.splitlines()[-1]
    assert "no checkpoint of step 8" in last
    assert "No space left on device" in last
    assert f"the last complete one is {folder / 'checkpoints' / 'step-00000004'}" in last
    assert "Traceback" not in full.stdout
    assert checkpoints(folder) == ["step-00000004"]
    assert damage(folder / "checkpoints" / "step-00000004") is None

    again = start(plan, tiny_config, run)  # while it is full still: told, and nothing is spoilt
    assert again.returncode in (1, 2)
    assert "No space left on device" in again.stdout.splitlines()[-1]
    assert "Traceback" not in again.stdout
    assert damage(folder / "checkpoints" / "step-00000004") is None

    (plan.folder / "ballast").unlink()
    done = start(plan, tiny_config, run)
    assert done.returncode == 0, done.stdout
    assert {record["step"] for record in read_records(folder)} == set(range(1, 13))


@pytest.mark.long
def test_a_disk_that_is_full_for_a_while_costs_checkpoints_and_nothing_else(disk, tiny_config):
    """For longer than a rank may be silent, and for more lines than a block of the disk holds."""
    plan = Plan(
        disk / "marks",
        (
            Fault("fill", rank=0, step=3, phase="forward"),
            Fault("pause", rank=1, step=6, phase="data"),
            Fault("free", rank=0, step=11, phase="forward"),
        ),
    )
    run = f"run.dir={disk / 'runs'}"
    done = start(plan, tiny_config, run, "checkpoint.on_error=go_on")
    plan.check()
    folder = disk / "runs" / "tiny"
    assert done.returncode == 0, done.stdout
    assert "no checkpoint of step 4" in done.stdout
    assert "no checkpoint of step 8" in done.stdout
    assert "metrics.jsonl: No space left on device; held in memory" in done.stdout
    assert checkpoints(folder) == ["step-00000012"]
    assert [record["step"] for record in read_records(folder)] == [*range(1, 13)]
