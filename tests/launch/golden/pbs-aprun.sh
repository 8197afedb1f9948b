#!/bin/bash
#PBS -N one
#PBS -l select=4:ncpus=64
#PBS -l place=scatter
#PBS -j oe
#PBS -o '/home/me/my project/runs/one/job/scheduler.txt'
#PBS -r n

exec >> '/home/me/my project/runs/one/job/log.txt' 2>&1  # the scheduler itself would show it only at the end
set -e
unset LD_PRELOAD
cd '/home/me/my project'
exec /opt/py/bin/python -m fever.launch.schedulers.supervisor '/home/me/my project/runs/one/job' aprun -n 4 -N 1 -d 64 -cc none
