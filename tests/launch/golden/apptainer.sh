#!/bin/bash -l
#PBS -N one
#PBS -A myproject
#PBS -q workq-route
#PBS -l select=2:system=crux
#PBS -l place=scatter
#PBS -l filesystems=home:eagle
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -o '/home/me/my project/runs/one/job/scheduler.txt'
#PBS -r n

exec >> '/home/me/my project/runs/one/job/log.txt' 2>&1  # the scheduler itself would show it only at the end
set -e
unset LD_PRELOAD
# shellcheck disable=SC1091
. /home/me/envs/fever/bin/activate
cd '/home/me/my project'
exec python -m fever.launch.schedulers.supervisor '/home/me/my project/runs/one/job' mpiexec -n 2 --ppn 1 --cpu-bind none apptainer exec --bind='/home/me/my project:/home/me/my project' --bind='/home/me/my project/runs/one:/home/me/my project/runs/one' --bind=/scratch:/scratch --bind=/home/me/data:/data --nv /home/me/fever.sif
