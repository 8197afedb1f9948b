"""Schedulers that are reached by ssh: a site's file with `login: HOST` submits through that host, its login node.

    target.py   the settings under `login:`, and what `--on FILE` does
    link.py     one ssh connection: files as for clusters, and questions to the fever over there
    jobs.py     submitting, following, stopping
    session.py  the fever over there: the site's own scheduler classes, run where the scheduler is

On the login node a job has one folder, `RUNS/NAME-ID`: its run directory, which is mirrored here, `code`, and
`records`, the user's folder of that fever. The last two are removed when the job has ended and its files are here.
"""
