#!/bin/bash
# chinese: 8 ranks on 1 node
#
#   mkdir -p runs/chinese && sbatch SCRIPT       on a file system that all nodes share
#
# A slice that Slurm ends or preempts saves, leaves the marker `requeue` in the run's folder, and is
# queued again from here; the marker `done` ends it. `scancel JOB` saves as well, and ends it for
# good: a cancelled job does not come back.
#
#SBATCH --job-name=chinese
#SBATCH --output=runs/chinese/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=6
#SBATCH --time=24:00:00
#SBATCH --partition=gpu
#SBATCH --account=nlp
#SBATCH --requeue
#SBATCH --signal=B:USR1@120

cd -- /home/me/roformer || exit 1
set -u

overrides=(
  launch.num_processes=8
  launch.slurm.gpus_per_node=8
  launch.slurm.cpus_per_task=6
  launch.slurm.time=24:00:00
  launch.slurm.partition=gpu
  launch.slurm.account=nlp
)
run=runs/chinese
job=$SLURM_JOB_ID
restart=${SLURM_RESTART_COUNT:-0}

# the rendezvous: on the first node, at a port of this job and restart
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + (7 * SLURM_JOB_ID + restart) % 10000))
export MASTER_ADDR MASTER_PORT
export ROFORMER_RANKS=8  # a start with any other number of ranks is refused

say() { echo "$(date '+%F %T') job $job, start $restart: $*"; }

newest_checkpoint() {
  local complete=("$run"/checkpoints/step-*/MANIFEST.json)
  echo "${complete[-1]}"
}

mkdir -p -- "$run"
rm -f -- "$run/stop" "$run/requeue"  # the last slice's
before=$(newest_checkpoint)
say "8 ranks on $SLURM_JOB_NODELIST, rendezvous $MASTER_ADDR:$MASTER_PORT, logs in $run/logs"

# Slurm signals this shell alone before the time limit; the ranks see the file, agree on a step, save.
trap ': >"$run/stop"; say "asked to stop: saving"' USR1 TERM

# One task a rank, and no launcher between: Slurm then sees each rank's end, and its own signals reach
# every rank at once. (DeepSpeed's launcher on each node would end its ranks one after another, cut
# saves off after 30 s, and return 0 where a signal ended it.)
srun --export=ALL --kill-on-bad-exit=1 --nodes=1 --ntasks-per-node=8 \
  --cpus-per-task=6 \
  .venv/bin/python -m launch.train configs/paper/chinese.yaml "${overrides[@]}" &
step=$!
while kill -0 "$step" 2>/dev/null; do wait "$step"; done  # a trapped signal ends a wait early
wait "$step"
code=$?
trap '' USR1 TERM  # the next slice must not find a file that asks it to stop

# srun loses exit codes, so the markers in the run's folder decide.
if [ -e "$run/done" ]; then
  say "finished: $run"
  exit 0
fi
if [ ! -e "$run/requeue" ]; then
  say "failed with exit code $code: see above, and $run/logs; submit again to go on from the last checkpoint"
  exit $((code == 0 ? 1 : code))
fi
state=$(squeue --noheader --jobs="$job" --format=%T)
if [ "$state" != RUNNING ]; then
  say "saved; the job is $state, so it is not queued again"
  exit 75
fi
if [ "$(newest_checkpoint)" = "$before" ]; then
  say "no step further than at the start of this slice: give it a longer time limit"
  exit 1
fi
if [ "$restart" -ge 100 ]; then
  say "saved; queued again 100 times already (launch.slurm.max_requeues)"
  exit 75
fi
say "saved; queued again"
scontrol requeue "$job" && exit 0
say "Slurm refuses to queue it again; submit it once more to go on"
exit 75
