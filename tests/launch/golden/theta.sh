#!/bin/bash
#PBS -N one
#PBS -A science
#PBS -q prod
#PBS -l select=128:ncpus=64
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -o '/home/me/my project/runs/one/job/scheduler.txt'
#PBS -r y

exec >> '/home/me/my project/runs/one/job/log.txt' 2>&1  # the scheduler itself would show it only at the end
set -e
unset LD_PRELOAD
module load miniconda-3
eval "$(conda shell.bash hook)"
conda activate fever
cd '/home/me/my project'
exec python -m fever.launch.schedulers.supervisor '/home/me/my project/runs/one/job' aprun -n 128 -N 1 -d 64 -cc none
