"""The scripts beside their templates, as `roformer launch` writes them; `make golden` does."""

from pathlib import Path

from configs.loader import load
from launch.compare import plan_runs
from launch.hostfile import Host
from launch.run_folder import folder_of
from launch.scripts import Call, Element, hostfile_script, shards_script, slurm_script

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "launch" / "templates"
CONFIG = Path("configs/paper/chinese.yaml")
HERE = Path("/home/me/roformer")

GPUS = ("launch.num_processes=8", "launch.slurm.gpus_per_node=8", "launch.slurm.cpus_per_task=6")
SITE = ("launch.slurm.time=24:00:00", "launch.slurm.partition=gpu", "launch.slurm.account=nlp")
NODE = (*GPUS, *SITE)
CONTAINER = (
    *NODE,
    "launch.nodes=2",
    "launch.container=[apptainer, exec, --nv, --bind, /data, images/torch 2.13.sif]",
    "launch.python=python",
    "launch.setup=[module purge, module load cuda/12.6 nccl]",
    "launch.environment.NCCL_IB_HCA=mlx5_0,mlx5_1",
    "launch.environment.GREETING='it''s \"a=b\" [c] \\${HOME}'",
    'launch.environment.LINES="one\\ntwo"',
    "launch.slurm.srun_options=[--cpu-bind=cores]",
    "launch.slurm.options=[--exclusive, --constraint=a100]",
)


def _call(*overrides: str) -> Call:
    return Call(CONFIG, overrides, HERE, python=".venv/bin/python")


def _slurm(*overrides: str) -> str:
    return slurm_script(load(ROOT / CONFIG, overrides), _call(*overrides))


def _seeds() -> str:
    overrides = (*NODE, "run.name=three", "compare.seeds=[1,2,3]", "launch.slurm.array_limit=2")
    config = load(ROOT / CONFIG, (*overrides, "compare.arms={rope: [], learned: []}"))
    runs = [r for r in plan_runs(config, ROOT / CONFIG, overrides) if r.arm == "rope"]
    own = [run.overrides[len(overrides) :] for run in runs]
    elements = [Element(str(folder_of(r.config)), o) for r, o in zip(runs, own, strict=True)]
    return slurm_script(config, _call(*overrides), elements)


def _hostfile() -> str:
    hosts = [Host("node1", tuple(range(8))), Host("node2", tuple(range(8)))]
    return hostfile_script(load(ROOT / CONFIG), _call(), hosts, hostfile=Path("hosts"))


EXAMPLES = {
    "slurm-one-node.sh": lambda: _slurm(*NODE),
    "slurm-four-nodes.sh": lambda: _slurm(*NODE, "launch.nodes=4"),
    "slurm-container.sh": lambda: _slurm(*CONTAINER),
    "slurm-seeds.sh": _seeds,
    "slurm-shards.sh": lambda: shards_script(load(ROOT / CONFIG, NODE), _call(*NODE), 16),
    "hostfile.sh": _hostfile,
}


if __name__ == "__main__":
    for name, render in EXAMPLES.items():
        (TEMPLATES / name).write_text(render(), encoding="utf-8")
