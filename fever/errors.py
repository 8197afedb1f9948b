"""What can go wrong because of the input; the command line prints these as one sentence."""


class FeverError(Exception):
    """The input cannot be used as it is. The message says what to do; the exit code is 2."""


class ContractError(FeverError):
    """An environment broke Gymnasium's contract. The message names the environment and the step."""


class TrainingError(Exception):
    """Training itself failed (a loss that is not a number, samplers that keep dying). The exit code is 1."""
