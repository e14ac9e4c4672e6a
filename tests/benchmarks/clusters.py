"""What a cluster costs: the start, a requeue, and two nodes in place of one.

    python -m tests.benchmarks.clusters [--turns 5] [--steps 40] [--json results.json]

The nodes of its Slurm are network namespaces of this machine (root; slurm-wlm, munge, iproute2):
their network is the loopback's kin, and they share its cores. Two ranks of a 4 x 256 model take
turns on one node and on two, on the same rows. The start is counted from `roformer launch --slurm
--submit` to the end of step 1; a requeue from Slurm's signal to the end of the next slice's first
step, of which Slurm's wait takes 5 s here, 120 s where a site leaves AuthInfo alone.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from data_pipeline.config import TokenizerConfig
from data_pipeline.shards import write_shards
from data_pipeline.tokenizers import load_tokenizer
from tests.benchmarks.timing import print_table, ratio, write_json
from tests.conftest import make_documents
from tests.integration.processes import ROOT, read_records
from tests.slurm import Cluster, obstacle, slurm_cluster, wait_for

WARM_STEPS = 5
"""Left out of a rate."""


class Job(NamedTuple):
    """A run that was submitted."""

    number: str
    folder: Path
    begun: float
    """Unix time of the command."""

    def records(self) -> list[dict]:
        return read_records(self.folder) if (self.folder / "metrics.jsonl").exists() else []


def make_config(folder: Path, steps: int) -> Path:
    """Write shards and a config that trains on them."""
    tokenizer = load_tokenizer(TokenizerConfig(kind="bytes"))
    documents = make_documents(2000, seed=1)
    settings = {"seed": 1, "min_shards": 8, "shard_mib": 64, "workers": 1}
    write_shards(documents, tokenizer, folder / "shards", **settings)
    stage = {"name": "only", "seq_len": 256, "global_batch": 16, "steps": steps}
    sizes = {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "intermediate_size": 1024}
    config = {
        "run": {"name": "run", "dir": str(folder / "runs")},
        "tokenizer": {"kind": "bytes"},
        "data": {"train": str(folder / "shards"), "lanes": 8},
        "model": sizes | {"max_positions": 256, "dropout": 0.0},
        "curriculum": {"stages": [stage]},
        "engine": {"device_tokens": 2048},
        "tracking": {"every_steps": 1, "mlflow": {"uri": None}},
        "checkpoint": {"every_steps": 0},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def submit(cluster: Cluster, config: Path, name: str, *, nodes: int, processes: int) -> Job:
    """Submit a run by `roformer launch`."""
    words = [f"run.name={name}", f"launch.nodes={nodes}", f"launch.num_processes={processes}"]
    command = [sys.executable, "-m", "launch.cli", "launch", str(config), "--slurm", "--submit"]
    begun = time.time()
    done = subprocess.run(
        [*command, *words],
        env=cluster.environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    told = dict(line.split(maxsplit=1) for line in done.stdout.splitlines()[:3])
    return Job(told["job"], Path(told["script"]).parent, begun)


def finish(cluster: Cluster, job: Job) -> list[dict]:
    """Wait for a job's end; return its records."""
    state = cluster.wait(job.number, timeout_s=900)["JobState"]
    if state != "COMPLETED":
        raise RuntimeError(f"job {job.number} is {state}: see {job.folder}")
    return job.records()


def tokens_per_s(records: Sequence[dict]) -> float:
    """Return the rate from the end of the warm steps to the last one's."""
    first, last = records[WARM_STEPS - 1], records[-1]
    return (last["tokens"] - first["tokens"]) / (last["time"] - first["time"])


def requeue_s(cluster: Cluster, job: Job) -> float:
    """Signal a job as Slurm does; return the seconds to the next slice's first step."""
    wait_for(f"steps of {job.folder}", lambda: len(job.records()) >= WARM_STEPS)
    begun = time.time()
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    wait_for("the requeue", lambda: cluster.job(job.number)["Restarts"] == "1")
    num_records = len(job.records())
    return float(finish(cluster, job)[num_records]["time"]) - begun


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if reason := obstacle():
        sys.exit(reason)
    starts: dict[int, list[float]] = {1: [], 2: []}
    rates: dict[int, list[float]] = {1: [], 2: []}
    requeues: list[float] = []
    with (
        tempfile.TemporaryDirectory() as name,
        slurm_cluster(Path(name) / "cluster", nodes=2) as cluster,
    ):
        os.chdir(ROOT)
        config = make_config(Path(name), arguments.steps)
        for turn in range(arguments.turns):
            for nodes in (1, 2) if turn % 2 else (2, 1):
                run = f"{turn}-{nodes}"
                job = submit(cluster, config, run, nodes=nodes, processes=2 // nodes)
                records = finish(cluster, job)
                starts[nodes].append(records[0]["time"] - job.begun)
                rates[nodes].append(tokens_per_s(records))
            job = submit(cluster, config, f"{turn}-requeued", nodes=2, processes=1)
            requeues.append(requeue_s(cluster, job))
    rows = [
        {"what": f"start, {nodes} node{'s' * (nodes > 1)}, s", "values": starts[nodes]}
        for nodes in starts
    ]
    rows += [{"what": "requeue, s", "values": requeues}]
    rows += [
        {"what": f"tokens/s, {nodes} node{'s' * (nodes > 1)}", "values": rates[nodes]}
        for nodes in rates
    ]
    table = [
        [row["what"], *(f"{f(row['values']):,.1f}" for f in (statistics.median, min, max))]
        for row in rows
    ]
    print_table(["what", "median", "least", "most"], table)
    print(f"\ntokens/s of two nodes by those of one: {ratio(rates[2], rates[1])}")
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
