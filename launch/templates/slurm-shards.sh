#!/bin/bash
# chinese: its shards in 16 parts
#
#   mkdir -p runs/chinese && sbatch SCRIPT       on a file system that all nodes share
#   sbatch --dependency=afterok:JOB SCRIPT
#   sbatch --parsable --dependency=afterok:JOB --job-name=chinese-merge --output=runs/chinese/slurm-%j.log --time=24:00:00 --partition=gpu --account=nlp '--wrap=cd /home/me/roformer && .venv/bin/python -m launch.cli shards configs/paper/chinese.yaml launch.num_processes=8 launch.slurm.gpus_per_node=8 launch.slurm.cpus_per_task=6 launch.slurm.time=24:00:00 launch.slurm.partition=gpu launch.slurm.account=nlp --merge'
#
# The first array tokenizes, the second writes the shards, and one job joins what they left and
# writes the index. What is done is kept: each may be submitted again after any failure.
#
#SBATCH --job-name=chinese-shards
#SBATCH --output=runs/chinese/slurm-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=1
#SBATCH --time=24:00:00
#SBATCH --partition=gpu
#SBATCH --account=nlp
#SBATCH --requeue
#SBATCH --array=0-15

cd -- /home/me/roformer || exit 1
set -u

exec .venv/bin/python -m launch.cli shards configs/paper/chinese.yaml launch.num_processes=8 launch.slurm.gpus_per_node=8 launch.slurm.cpus_per_task=6 launch.slurm.time=24:00:00 launch.slurm.partition=gpu launch.slurm.account=nlp --part "$SLURM_ARRAY_TASK_ID/16"
