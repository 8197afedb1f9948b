"""Ray's settings: quiet, closed to others, of bounded memory. Ray reads them from the environment."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping

from fever.job import HEAD, JobFolder

RAY_SETTINGS = {  # of every Ray that fever starts: quiet, and closed to processes without the token
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_task_events_report_interval_ms": "0",  # record no tasks: the GCS keeps kilobytes of each
}
INLINE_BYTES = 10_000_000  # up to which results and arguments are sent as they are; as fast as the object store
LOOPBACK_SETTINGS = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT")
PRIVATE_SETTINGS = {  # of a Ray on this machine alone
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # this machine is 127.0.0.1, so all of Ray's servers bind to that
    "AUTOSCALER_METRIC_PORT": "-1",  # no pages of metrics: a port that does not exist
    "DASHBOARD_METRIC_PORT": "-1",
    "RAY_raylet_start_wait_time_s": "2",  # then ray.init asks again, up to 30 s; in between, deaths are noticed
    "RAY_gcs_rpc_server_reconnect_timeout_s": "1000000",  # Ray would end this process after the GCS's death
    # Without its raylet, using Ray's object store ends this process, so as little as possible goes there.
    "RAY_max_direct_call_object_size": str(INLINE_BYTES),
    "RAY_task_rpc_inlined_bytes_limit": str(10 * INLINE_BYTES),
}
# An environment may be an MPI program. Its mpirun would take the machines of the job for its own, start ranks there
# through the scheduler, and bind those of all workers to the same first cores. With these it starts them on its own
# machine, and they run on the cores that it has itself. Its command line has the last word.
MPI_SETTINGS = {
    "OMPI_MCA_plm": "^slurm,tm,lsf,alps",  # Open MPI up to 4: what starts daemons, what lists machines
    "OMPI_MCA_ras": "^slurm,tm,lsf,gridengine,alps",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",  # ranks that wait spin; so they let others run
    "PRTE_MCA_plm": "^slurm,tm,lsf,alps,pals",  # the same for Open MPI 5, which has PRRTE for that
    "PRTE_MCA_ras": "^slurm,tm,pbs,lsf,gridengine,alps,flux",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "HYDRA_LAUNCHER": "fork",  # MPICH, which binds nothing by default
    "HYDRA_RMK": "user",
}


def mpi_settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """MPI_SETTINGS, without those that somebody has set otherwise."""
    return {name: value for name, value in MPI_SETTINGS.items() if name not in environ}


def apply_settings(job: JobFolder | None) -> None:
    """Set Ray's settings for this process and those that it starts, whatever the shell's are. Ray reads some of them
    once, when it is imported: afterwards only where it listens is changed."""
    if "ray" in sys.modules:
        if job is None:
            _listen_at_home()
        return
    settings = dict(RAY_SETTINGS)
    if job is None:
        settings |= {**PRIVATE_SETTINGS, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    elif job.read(HEAD) is None:  # a cluster that outlives jobs has its own authentication, or none
        settings.pop("RAY_AUTH_MODE")
    os.environ.update(settings)


def _listen_at_home() -> None:
    """Have a Ray that this process starts bind to 127.0.0.1 although Ray was imported before, by the user's program.
    Its processes read the environment, and Ray's module has read it already."""
    from ray._private import ray_constants

    os.environ.update({name: PRIVATE_SETTINGS[name] for name in LOOPBACK_SETTINGS})
    ray_constants.ENABLE_RAY_CLUSTER = False
