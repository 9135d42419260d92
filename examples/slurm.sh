#!/usr/bin/env bash
# Train on 2 machines with 4 GPUs each: `sbatch examples/slurm.sh`.
#
# `srun` starts 8 processes. They read from its variables which of them they are, and where the first one is.
# Two minutes before the job's time is up, SLURM sends them SIGTERM: the script's Checkpoint saves then, and leaves with
# 143. The job is queued again, and resumes from there. All machines must be able to read the folder.
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"

srun python examples/train_ddp.py --epochs 50 --folder "${SCRATCH:-$HOME}/digits-ddp" || {
    code=$?
    if [ "$code" -eq 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
    exit "$code"
}
