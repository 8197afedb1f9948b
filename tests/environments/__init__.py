"""Small environments for tests, found as "tests.environments:Name".

Every constructor accepts plain JSON values (a space by its name in `SPACES`), so that every environment can be named
on a command line and in a run's configuration.
"""

# ruff: noqa: F401 - the names are for others
from tests.environments.episodes import (
    ContextEnv,
    Counter,
    CounterEnv,
    DrawnEnv,
    InfoEnv,
    NextStepCounters,
    ReusingCounters,
    SameStepCounters,
    TerminatingEnv,
    TextEnv,
    TimeLimitEnv,
    UnboundedEnv,
    make_time_limit,
)
from tests.environments.faults import (
    FAULTS,
    BrokenEnv,
    ClosingEnv,
    CrashEnv,
    ExitElsewhereEnv,
    ExitEnv,
    FailingEnv,
    OnlyHereEnv,
    PrintingEnv,
    UnreliableEnv,
)
from tests.environments.goals import (
    BitFlipEnv,
    EndingWalkEnv,
    NoRewardEnv,
    OddRewardEnv,
    VectorGoals,
    WalkEnv,
)
from tests.environments.pictures import PictureEnv, UndrawnEnv
from tests.environments.scenarios import ScenarioEnv
from tests.environments.stuck import SlowCallback, StuckDiskEnv, StuckEnv, StuckInCloseEnv, WarningEnv
from tests.environments.tasks import (
    SPACES,
    DictEnv,
    IdentityEnv,
    ImageEnv,
    MaskedEnv,
    MemoryEnv,
    NextStepMasked,
    SameStepMasked,
    TupleEnv,
)
from tests.environments.timing import BusyEnv, SimulatorEnv, SleepEnv, UnevenEnv

for _thing in list(globals().values()):
    if getattr(_thing, "__module__", "").startswith(f"{__name__}."):
        _thing.__module__ = __name__  # messages and configurations name environments by their module
