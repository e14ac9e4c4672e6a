"""Single runs as a user starts, stops and breaks them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.processes import ROOT, read_records, roformer
from trainer.distributed import free_port


@pytest.mark.parametrize("to_the_group", [False, True])
def test_a_signal_saves_and_exits_75_and_the_next_start_goes_on(tiny_config, to_the_group):
    overrides = ["curriculum.stages.0.steps=80"]
    if to_the_group:
        overrides += [
            "launch.num_processes=2",
            "data.workers=1",
            "tracking.mlflow.uri=sqlite:///${run.dir}/mlflow.db",
        ]
    command = [sys.executable, "-m", "launch.cli", "train", str(tiny_config), *overrides]
    folder = tiny_config.parent / "runs" / "tiny"
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or len(read_records(folder)) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if to_the_group:
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
    else:
        process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    assert (folder / "requeue").exists()
    assert not (folder / "done").exists()
    assert not (folder / "stop").exists()
    stopped_at = read_records(folder)[-1]["step"]
    assert stopped_at < 87
    done = roformer("train", tiny_config, *overrides)
    assert done.returncode == 0, done.stdout
    assert not (folder / "requeue").exists()
    steps = [record["step"] for record in read_records(folder)]
    assert steps == list(range(1, 88))  # goes on at the next step, and none is done twice
    assert len({record["data/hash"] for record in read_records(folder)}) == 87


def test_profile_shows_the_parts_of_a_step_on_two_ranks(tiny_config):
    """And makes nothing but the trace."""
    trace = tiny_config.parent / "trace.json"
    command = ("profile", tiny_config, "launch.num_processes=2", "engine.zero_stage=2")
    done = roformer(*command, "--steps=2", f"--trace={trace}")
    assert done.returncode == 0, done.stdout
    for part in ("matmul", "attention", "rotary", "head", "optimizer", "communication", "data"):
        assert f"│ {part} " in done.stdout, done.stdout
    assert "MFU" in done.stdout
    events = json.loads(trace.read_text())["traceEvents"]
    assert any(event.get("name") == "part: communication" for event in events)
    assert not (tiny_config.parent / "runs").exists()


def test_a_loss_that_is_no_number_ends_the_run_with_a_message(tiny_config):
    done = roformer("train", tiny_config, "optimizer.lr=1e30", "optimizer.clip_norm=0")
    assert done.returncode == 1
    assert "lower optimizer.lr" in done.stdout
    assert "Traceback" not in done.stdout
    assert not (tiny_config.parent / "runs" / "tiny" / "done").exists()


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_launchers_of_the_ecosystem_work(tiny_config, launcher):
    binaries = Path(sys.executable).parent
    command = {
        "deepspeed": [binaries / "deepspeed", "--num_gpus=2", "--module", "launch.train"],
        "torchrun": [binaries / "torchrun", "--nproc-per-node=2", "-m", "launch.train"],
    }[launcher]
    command.insert(1, f"--master_port={free_port()}")
    overrides = ["launch.num_processes=2", "curriculum.stages.0.steps=1", f"run.name={launcher}"]
    done = subprocess.run(
        [*map(str, command), str(tiny_config), *overrides],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tiny_config.parent / "runs" / launcher / "done").exists()
