#!/bin/bash
#SBATCH --job-name=one
#SBATCH --output='/home/me/my project/runs/one/job/log.txt'
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --no-requeue
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --account=myproject
#SBATCH --qos=regular
#SBATCH --time=04:00:00
#SBATCH --no-kill
#SBATCH --constraint=cpu

set -e
unset LD_PRELOAD
module load conda
eval "$(conda shell.bash hook)"
conda activate fever
cd '/home/me/my project'
exec python -m fever.launch.schedulers.supervisor '/home/me/my project/runs/one/job' srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --no-kill --wait=0 --mpi=none --export=ALL
