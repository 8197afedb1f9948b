#!/bin/bash
#BSUB -J one
#BSUB -P science
#BSUB -q batch
#BSUB -nnodes 8
#BSUB -W 120
#BSUB -o "/home/me/my project/runs/one/job/scheduler.txt"
#BSUB -r

exec >> '/home/me/my project/runs/one/job/log.txt' 2>&1  # the scheduler itself would show it only at the end
set -e
unset LD_PRELOAD
module load python/3.11
# shellcheck disable=SC1091
. /home/me/envs/fever/bin/activate
cd '/home/me/my project'
exec python -m fever.launch.schedulers.supervisor '/home/me/my project/runs/one/job' jsrun -n 8 -r 1 -a 1 -c 42 -b rs
