#!/bin/bash -l
#SBATCH --job-name=one
#SBATCH --output='/home/me/my project/runs/one/job/log.txt'
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=36
#SBATCH --partition=short
#SBATCH --account=abc
#SBATCH --qos=normal
#SBATCH --time=00:20:00
#SBATCH --no-kill
#SBATCH --mem=80G
#SBATCH --constraint=haswell
#SBATCH --mail-type=END

set -e
unset LD_PRELOAD PYTHONHOME
module purge
module use /opt/site/modulefiles
module load gcc/12.2
module load python/3.11
# shellcheck disable=SC1091
. /home/me/envs/fever/bin/activate
export OMP_NUM_THREADS=1
ulimit -n 65536 || true
cd '/home/me/my project'
exec python -m fever.launch.schedulers.supervisor '/home/me/my project/runs/one/job' srun --ntasks-per-node=1 --cpus-per-task=36 --cpu-bind=none --kill-on-bad-exit=0 --no-kill --wait=0 --mpi=none --export=ALL --distribution=cyclic
