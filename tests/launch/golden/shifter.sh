#!/bin/bash
#SBATCH --job-name=one
#SBATCH --output='/home/me/my project/runs/one/job/log.txt'
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --no-kill

set -e
unset LD_PRELOAD
cd '/home/me/my project'
exec /opt/py/bin/python -m fever.launch.schedulers.supervisor '/home/me/my project/runs/one/job' srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --no-kill --wait=0 --mpi=none --export=ALL shifter --image=me/fever:1 --volume="$SCRATCH":/data
