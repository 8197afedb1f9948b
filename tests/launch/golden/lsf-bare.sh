#!/bin/bash
#BSUB -J one
#BSUB -n 1 -R "span[ptile=1]" -x
#BSUB -o "/home/me/my project/runs/one/job/scheduler.txt"
#BSUB -rn

exec >> '/home/me/my project/runs/one/job/log.txt' 2>&1  # the scheduler itself would show it only at the end
set -e
unset LD_PRELOAD
cd '/home/me/my project'
exec /opt/py/bin/python -m fever.launch.schedulers.supervisor '/home/me/my project/runs/one/job' mpiexec -n 1 --ppn 1
