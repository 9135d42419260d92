#!/usr/bin/env bash
# Train on two machines: run this on both, with the name of the first and a free port of it:
#
#     HEAD=first-machine:29400 bash examples/two_nodes.sh --epochs 3 --folder /shared/digits
#
# Both need the same files, and a folder that both see for the checkpoints. NPROC is the number of processes on each,
# `gpu` for one a GPU. When a process dies, all are started again, and resume from the last checkpoint.
# Without HEAD both "machines" are this one, which is good for a try.
set -euo pipefail
script="$(dirname "${BASH_SOURCE[0]}")/train_ddp.py"
address=()

agent() {
    torchrun --nnodes=2 --nproc-per-node="${NPROC:-1}" --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint="$HEAD" \
        --rdzv-id="${JOB:-digits}" "${address[@]}" "$script" "$@"
}

if [ -n "${HEAD:-}" ]; then agent "$@"; exit; fi

HEAD="localhost:${PORT:-29400}" address=(--local-addr=localhost)
agent "$@" & one=$!
agent "$@" & two=$!
wait "$one" && wait "$two"
