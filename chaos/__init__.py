"""Trainings that are broken on purpose: `make chaos`, or `python -m chaos --help`.

    schedule.py    which faults hit which training, from a seed
    envs.py        the environment that they learn: raises, hangs, ... when told to
    training.py    one training as a process: start, follow its rows, resume, end
    processes.py   what belongs to a training, found in /proc by a mark in its environment
    faults.py      the faults: how each is caused, and when it is over
    case.py        one training from its start through its faults to its end
    lab.py         the same on several machines, which crash and lose their cables
    ledger.py      what is wrong with what a training left: lost rows, transitions counted twice, leftovers
    report.py      the table, and the bars that it must meet

Trainings are ordinary `fever train` and `fever resume` commands. Nothing in fever knows of this package.
"""
