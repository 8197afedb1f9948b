"""Exceptions of fever. The command line prints their message as one sentence, without a traceback."""


class FeverError(Exception):
    """The input is wrong: an option, a file, an environment. The message says what to do; the exit code is 2."""


class ContractError(FeverError):
    """An environment violated Gymnasium's API. The message names the environment and the step."""


class DamagedError(FeverError):
    """A file that fever wrote is missing or has changed since."""


class TrainingError(Exception):
    """Training failed: a loss became NaN, or samplers keep dying. The exit code is 1."""


class RayLost(TrainingError):
    """Ray itself died: its raylet or its GCS. The message says which."""
