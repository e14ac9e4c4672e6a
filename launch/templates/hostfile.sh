#!/bin/bash
# chinese: 16 ranks on the hosts of hosts
#
#   bash SCRIPT         starts itself on every host through pdsh and ssh
#   bash SCRIPT NUMBER  runs the ranks of one host, where ssh is not to be had: start it on every host
#     0: node1, 8 ranks
#     1: node2, 8 ranks
#
# The folder below must be shared by all hosts. Ctrl-C, SIGTERM and SIGUSR1 let the run save and end;
# the markers `done` and `requeue` in the run's folder say how it ended.

cd -- /home/me/roformer || exit 1
run=runs/chinese
mkdir -p -- "$run"

if [ $# -eq 0 ]; then
  rm -f -- "$run/stop" "$run/requeue" "$run/done"
  trap ': >"$run/stop"; echo "asked to stop: saving" >&2' INT TERM USR1
  # in a session of its own: a Ctrl-C reaches this shell alone; -S gives the largest exit code
  PDSH_RCMD_TYPE=ssh setsid pdsh -S -f 2 -w node1,node2 \
    "exec bash $(printf %q "$(realpath -- "$0")") %n" &
  hosts=$!
  while kill -0 "$hosts" 2>/dev/null; do wait "$hosts"; done
  wait "$hosts"
  code=$?
  [ -e "$run/done" ] && exit 0
  [ -e "$run/requeue" ] && exit 75
  exit $((code == 0 ? 1 : code))
fi

set -u
export ROFORMER_RANKS=16  # a start with any other number of ranks is refused
exec .venv/bin/python -m deepspeed.launcher.runner --hostfile hosts --no_ssh --node_rank "$1" \
  --master_addr node1 --master_port 28666 --no_local_rank \
  --module launch.train configs/paper/chinese.yaml
