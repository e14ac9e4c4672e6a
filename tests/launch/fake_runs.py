"""Run folders as training leaves them, with loss curves of a plausible shape."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

STAGES = (("short", 128, 64, 300), ("long", 256, 32, 240), ("brief", 64, 128, 160))
ENTROPY = {64: 0.22, 128: 0.08, 256: 0.0}  # nats that a shorter context costs


def run_config(
    name: str, positions: str = "rope", stages: Sequence[tuple[str, int, int, int]] = STAGES
) -> dict[str, Any]:
    fields = ("name", "seq_len", "global_batch", "steps")
    return {
        "run": {"name": name, "dir": "runs", "seed": 17, "batch_hash": False},
        "model": {"positions": positions, "num_layers": 4, "hidden_size": 192, "dropout": 0.1},
        "curriculum": {"stages": [dict(zip(fields, stage, strict=True)) for stage in stages]},
        "optimizer": {"lr": 1e-3, "betas": [0.9, 0.98]},
        "tracking": {
            "every_steps": 5,
            "mlflow": {"uri": "sqlite:///runs/mlflow.db", "experiment": "demo"},
        },
    }


def curve(
    *, rate: float = 1.0, seed: int = 0, stages: Sequence[tuple[str, int, int, int]] = STAGES
) -> list[dict[str, Any]]:
    """Records every 5 steps, evaluated every 20 at length 128; a higher rate learns faster."""
    rng = np.random.default_rng(seed)
    records = []
    step, tokens, elapsed = 0, 0, 0.0
    warmup = 40
    for name, seq_len, batch, steps in stages:
        for _ in range(steps):
            step += 1
            tokens += seq_len * batch
            elapsed += seq_len * batch / 41_000 * (1.0 if rate == 1 else 1.04)
            if step % 5:
                continue
            t = step * rate
            loss = 4.6 + 2.1 * np.exp(-t / 260) + 2.4 * np.exp(-t / 22)
            noise = rng.normal(0, 0.05)
            records.append(
                {
                    "time": 1.8e9 + elapsed,
                    "elapsed_s": elapsed,
                    "step": step,
                    "tokens": tokens,
                    "stage": name,
                    "seq_len": seq_len,
                    "global_batch": batch,
                    "micro_batch": 16,
                    "accumulation": 2,
                    "lr": 1e-3 * min(1, step / warmup) * (1 - max(0, step - warmup) / 900),
                    "train/loss": loss + ENTROPY.get(seq_len, 0) + noise,
                    "train/accuracy": float(np.exp(-loss) * 20),
                    "train/targets": 1228,
                    "grad_norm": 1.0 + abs(noise),
                    "perf/tokens_per_s": 41_000.0 + 900 * noise,
                    "perf/mfu": 0.31,
                    "perf/data_wait_s": 0.004 * 5,
                    "memory/peak_gib": 1.25,
                    "data/hash": "ab12",
                }
            )
            if step % 20 == 0:
                records[-1] |= {
                    "eval/loss": float(loss + 0.1 + rng.normal(0, 0.008)),
                    "eval/accuracy": float(np.exp(-loss) * 19),
                    "eval/targets": 9000,
                    "eval/seq_len": 128,
                }
    return records


def write_run(
    folder: Path,
    records: Iterable[dict[str, Any]],
    config: dict[str, Any] | None = None,
    *,
    finished: bool = True,
) -> Path:
    folder.mkdir(parents=True)
    versions = {
        "python": "3.11.2",
        "torch": "2.13.0",
        "git": None,
        "data": {"train": "9f2c…", "eval": "1b7e…"},
        "world": 2,
        "device": "cpu: AMD EPYC x 2",
    }
    (folder / "config.yaml").write_text(
        yaml.safe_dump(config or run_config(folder.name), sort_keys=False)
    )
    (folder / "versions.json").write_text(json.dumps(versions))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if finished:
        (folder / "done").touch()
    return folder


def write_study(folder: Path, arms: dict[str, float], seeds: Sequence[int] = (17,)) -> Path:
    """Arms by learning rate of their curve."""
    names = {
        arm: [f"{arm}-seed{seed}" if len(seeds) > 1 else arm for seed in seeds] for arm in arms
    }
    for arm, rate in arms.items():
        for name, seed in zip(names[arm], seeds, strict=True):
            write_run(folder / name, curve(rate=rate, seed=seed), run_config(name, arm))
    plan = {"arms": list(arms), "seeds": list(seeds), "runs": names}
    (folder / "study.json").write_text(json.dumps(plan))
    return folder
