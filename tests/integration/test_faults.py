"""Runs that are killed, frozen, stalled and starved, through the real launcher on two ranks."""

import json
import socket
from pathlib import Path

import pytest

from tests.faults import Fault, Plan, train
from tests.integration.processes import read_records, roformer

pytestmark = pytest.mark.xdist_group("faults")

OVERRIDES = ("launch.num_processes=2", "data.workers=1", "engine.zero_stage=2")
EQUAL = ("data/hash", "train/loss", "grad_norm", "lr", "tokens", "eval/loss")


def start(plan: Plan, config: Path, *overrides: str):
    """Run to the end of this start; nothing of it may be left then."""
    done = train(plan, config, *OVERRIDES, *overrides)
    left = [p for p in Path("/proc").glob("[0-9]*") if str(plan.folder) in environment(p)]
    assert not left, f"{left} still run: {done.stdout}"
    return done


def environment(process: Path) -> str:
    try:
        is_dead = (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return "" if is_dead else (process / "environ").read_text(errors="replace")
    except OSError:
        return ""


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("checkpoints/*/MANIFEST.json"))


def test_a_run_that_is_killed_and_stopped_again_and_again_has_the_curve_of_one_that_is_not(
    tiny_config, tmp_path
):
    whole = roformer("train", tiny_config, "run.name=whole", *OVERRIDES)
    assert whole.returncode == 0, whole.stdout
    folder, host = tmp_path / "runs" / "tiny", socket.gethostname()
    plan = Plan(
        tmp_path / "marks",
        (
            Fault("kill", rank=1, step=8, phase="write"),
            Fault("raise", rank=1, step=10, phase="update"),
            Fault("stall", rank=1, step=11, phase="data"),
            Fault("term", rank=0, step=11, phase="data"),
        ),
    )
    killed = start(plan, tiny_config)
    assert killed.returncode == 1
    assert f"rank 1 on {host}: process " in killed.stdout
    assert "SIGKILL" in killed.stdout
    assert checkpoints(folder) == ["step-00000004"]  # that of step 8 was being written

    raised = start(plan, tiny_config)
    assert raised.returncode == 1
    assert "goes on from" in raised.stdout
    end = raised.stdout[raised.stdout.rindex("Traceback") :]
    assert "injected error" in end
    assert f"rank 1 on {host}: RuntimeError: an injected error" in end.splitlines()[-1]

    stopped = start(plan, tiny_config)  # ends in time: the rows would have come after 600 s
    assert stopped.returncode == 75, stopped.stdout
    assert (folder / "requeue").exists()
    assert checkpoints(folder)[-1] == "step-00000010"

    ended = start(plan, tiny_config, "checkpoint.keep_every=4", "checkpoint.keep=1")
    assert ended.returncode == 0, ended.stdout
    assert "changed since the last start: checkpoint.keep: 9 before, 1 now" in ended.stdout
    assert checkpoints(folder) == ["step-00000004", "step-00000008", "step-00000012"]
    plan.check()
    got = {record["step"]: record for record in read_records(folder)}
    for want in read_records(tmp_path / "runs" / "whole"):
        for key in EQUAL:
            assert got[want["step"]].get(key) == want.get(key), (want["step"], key)


def test_a_rank_that_is_frozen_is_named_and_all_ends(tiny_config, tmp_path):
    plan = Plan(tmp_path / "marks", (Fault("stop", rank=1, step=6, phase="backward"),))
    frozen = start(plan, tiny_config, "checkpoint.every_steps=0")
    assert frozen.returncode == 1
    assert f"rank 1 on {socket.gethostname()}: process " in frozen.stdout
    assert "it is stopped (SIGSTOP)" in frozen.stdout.splitlines()[-1]
    plan.check()


def test_bad_steps_and_a_full_disk_are_lived_through(tiny_config, tmp_path):
    plan = Plan(
        tmp_path / "marks",
        (
            Fault("nan_loss", rank=1, step=3, phase="forward"),
            Fault("full", rank=1, step=4, phase="write"),
            Fault("nan_gradient", rank=0, step=6, phase="forward"),
            Fault("nan_weights", rank=0, step=12, phase="save"),
        ),
    )
    done = start(plan, tiny_config, "checkpoint.on_error=go_on")
    plan.check()
    folder = tmp_path / "runs" / "tiny"
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert "is not finite everywhere" in last
    assert "step-00000008" in last
    assert "no checkpoint of step 4" in done.stdout
    assert "trains on (checkpoint.on_error=go_on)" in done.stdout
    assert checkpoints(folder) == ["step-00000008"]
    bad = [json.loads(line) for line in (folder / "bad_steps.jsonl").read_text().splitlines()]
    assert [(b["step"], b["not_finite"], b["ranks"]) for b in bad] == [
        (3, "loss", [1]),
        (6, "gradient", [0, 1]),
    ]
    assert all(b["documents"] and ".tar:0000" in b["documents"][0] for b in bad)
    records = read_records(folder)
    assert [r["step"] for r in records if r["train/loss"] is None] == [3, 6]
    assert records[-1]["train/bad_steps"] == 2
