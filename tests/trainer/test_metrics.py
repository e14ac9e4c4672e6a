import json
import math
import resource
import subprocess
import sys

import pytest
import torch

from trainer.curriculum import Factors, Stage
from trainer.metrics import (
    MetricsFile,
    Recorder,
    StepResult,
    hash_rows,
    measure_matmul_peak,
    peak_memory_gib,
)
from trainer.state import TrainState

STAGE = Stage("a", seq_len=16, global_batch=4, first_step=0, last_step=10, lr=1e-3, mask_rate=0.15)


def result(total=6.0, targets=2.0, **changes):
    fields = {
        "correct": 1.0,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "seconds": 0.5,
        "waited_s": 0.1,
        "lengths": (16, 16),
        "batch_hash": None,
    }
    return StepResult(total=total, targets=targets, **(fields | changes))


def recorder(file=None, every_steps=5):
    return Recorder(
        file,
        every_steps=every_steps,
        device=torch.device("cpu"),
        flops=lambda lengths, targets: 1000,
        peak_flops=4000.0,
    )


def test_a_record_weighs_targets_not_steps():
    records = recorder(every_steps=2)
    factors = Factors(2, 1, 2)
    assert records.record(STAGE, factors, TrainState(step=1), result(6.0, 2.0), {}) is None
    record = records.record(STAGE, factors, TrainState(step=2), result(30.0, 10.0), {})
    assert record["train/loss"] == 36.0 / 12.0  # the mean of means would be 3.0 too: see below
    record = None
    records.record(STAGE, factors, TrainState(step=3), result(2.0, 1.0), {})
    record = records.record(STAGE, factors, TrainState(step=4), result(40.0, 10.0), {})
    assert record["train/loss"] == pytest.approx(42.0 / 11.0)
    assert record["train/loss"] != pytest.approx((2.0 + 4.0) / 2)
    assert record["train/targets"] == 11
    assert record["perf/tokens_per_s"] == pytest.approx(2 * 64 / 1.0)
    assert record["perf/mfu"] == pytest.approx(2 * 1000 / 1.0 / 4000)


def test_records_are_made_at_intervals_stage_ends_evaluations_and_hashes():
    factors = Factors(2, 1, 2)

    def made(step, evaluation=None, **changes):
        state = TrainState(step=step)
        return recorder().record(STAGE, factors, state, result(**changes), evaluation or {})

    assert made(3) is None
    assert made(5) is not None
    assert made(10) is not None
    assert made(3, {"eval/loss": 1.0})["eval/loss"] == 1.0
    assert made(3, batch_hash="ff")["data/hash"] == "ff"


def test_file_is_strict_json_and_survives_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.write({"step": 1, "train/loss": float("nan"), "grad_norm": float("inf")})
    with path.open("a") as torn:
        torn.write('{"step": 2, "tra')
    with MetricsFile(path) as file:
        file.write({"step": 2, "train/loss": 1.5})
    lines = path.read_text().splitlines()
    assert json.loads(lines[0])["train/loss"] is None
    assert json.loads(lines[0])["grad_norm"] is None
    assert json.loads(lines[-1])["step"] == 2


def test_hash_of_a_batch_does_not_depend_on_who_holds_its_rows():
    rows = list(range(100, 112))
    for first in (0, 12, 7):
        alone = hash_rows([rows], first_row=first)
        for world in (2, 3, 4):
            shares = [
                [d for n, d in enumerate(rows, first) if n % world == rank] for rank in range(world)
            ]
            assert hash_rows(shares, first_row=first) == alone
    assert hash_rows([rows[::-1]], first_row=0) != hash_rows([rows], first_row=0)


def test_matmul_peak_is_a_rate():
    peak = measure_matmul_peak(torch.device("cpu"), torch.float32, size=128)
    assert 1e8 < peak < 1e15


@pytest.fixture
def small_files():
    """Let the system refuse files of more than 100 bytes, until told otherwise."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, old[1]))
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, old)
    resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_what_a_full_disk_refuses_is_held_and_comes_later(tmp_path, small_files, caplog):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        for step in range(1, 6):
            file.write({"step": step, "text": "x" * 20})
        assert 0 < len(path.read_text().splitlines()) < 5
        assert path.read_text().endswith("\n")  # no half a line
        assert "held in memory" in caplog.text
        small_files()
        file.write({"step": 6})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [*range(1, 7)]


def test_records_that_are_lost_in_the_end_are_an_error(tmp_path, small_files):
    def write() -> None:
        with MetricsFile(tmp_path / "metrics.jsonl") as file:
            file.write({"text": "x" * 200})

    with pytest.raises(OSError, match="1 records are lost"):
        write()


def test_a_bad_step_is_counted_and_weighs_nothing():
    records = recorder(every_steps=2)
    factors = Factors(2, 1, 2)
    bad = result(math.nan, 5.0, is_bad=True)
    assert records.record(STAGE, factors, TrainState(step=1), bad, {}) is None
    state = TrainState(step=2, bad_steps=1)
    record = records.record(STAGE, factors, state, result(6.0, 2.0), {})
    assert (record["train/loss"], record["train/bad_steps"]) == (3.0, 1)


def test_an_evaluation_that_was_cut_off_is_added_to_the_last_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.write({"step": 3, "train/loss": 1.5})
    with MetricsFile(path) as file:
        records = recorder(file)
        assert records.lacks_evaluation(3)
        assert not records.lacks_evaluation(4)
        records.add_evaluation({"eval/loss": 2.5})
        assert not records.lacks_evaluation(3)
    last = json.loads(path.read_text().splitlines()[-1])
    assert (last["step"], last["train/loss"], last["eval/loss"]) == (3, 1.5, 2.5)


def test_peak_memory_is_this_processs_and_not_that_of_the_one_that_started_it():
    block = bytearray(2**30)
    block[::4096] = b"1" * (2**30 // 4096)
    assert peak_memory_gib(torch.device("cpu")) > 1
    code = "import torch, trainer.metrics as m; print(m.peak_memory_gib(torch.device('cpu')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.1 < float(done.stdout) < 0.9
