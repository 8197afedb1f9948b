"""Runs on other machines: schedulers, MPI launchers, SSH hosts, AWS."""
