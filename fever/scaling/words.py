"""The report in sentences: is there a speedup, what is the next bottleneck and what changes it, what to mind."""

from __future__ import annotations

from fever.scaling.figures import FASTER, NOISE, SLOWER, UNKNOWN, Count, Figures, Interval, interval, ratios, verdict
from fever.scaling.measure import WORKERS, counted
from fever.scaling.model import CORES, ENVIRONMENT, INFERENCE, LEARNER, TRANSFER
from fever.text import format_duration, format_number

DIFFERENT = 1.1  # ratio of work per sample from which two counts are not said to do the same
GAIN = 1.05  # speedup below which nothing is gained
NETWORK = "network"  # what transfer is called between machines
ADVICE = {
    ENVIRONMENT: "a faster environment, or more of them at once",
    INFERENCE: "more environments (--envs), so that more act together in each worker, or a smaller network (hidden)",
    TRANSFER: "fewer, larger messages: larger batches (steps, --envs, or --scale-batch)",
    NETWORK: "fewer, larger messages (steps, --envs, --scale-batch), or a faster network (--interface)",
    LEARNER: "less work per sample: fewer epochs, a larger minibatch, a smaller network; or --device gpu",
    CORES: "more machines (--on), a cheaper environment, or no more workers than cores",
}


def answer(figures: Figures) -> str:
    """Whether there is a speedup, in one sentence with intervals."""
    found, others = _answer(figures), figures.counts[1:]
    once = [one for one in others if verdict(one, figures.base) == UNKNOWN]
    if not once or len(once) == len(others):  # of all of them it says so itself
        return found
    return f"{found}; measured in one round only, which says nothing of noise: {_compared(figures, once[-1])}"


def _answer(figures: Figures) -> str:
    """What the counts say that have an interval, if any has."""
    if len(figures.counts) < 2:
        return "cannot be told: fewer than two counts could be measured"
    base, kind = figures.base, figures.plan.kind
    verdicts = {one.count: verdict(one, base) for one in figures.counts[1:]}
    others = [one for one in figures.counts[1:] if verdicts[one.count] != UNKNOWN]
    if not others:
        best = figures.fastest if figures.fastest is not base else figures.counts[-1]
        return f"one round only: {_compared(figures, best)}; --rounds 3 tells noise"
    if FASTER in verdicts.values():
        best = max((one for one in others if verdicts[one.count] == FASTER), key=lambda one: one.rate)
        return f"yes: {_compared(figures, best)}{_beyond(figures)}"
    if SLOWER in verdicts.values():
        slower = [one for one in others if verdicts[one.count] == SLOWER]
        if others[-1] in slower:
            return f"no: more {kind} make this slower: {_compared(figures, others[-1])}"
        rest = ", ".join(str(one.count) for one in others if one not in slower)
        return f"no: {_compared(figures, slower[-1])}, and {rest} make no difference beyond the noise"
    return f"no difference beyond the noise: {_compared(figures, others[-1])}"


def _compared(figures: Figures, one: Count) -> str:
    """`4 workers are 3.61 times as fast as 1 (3.5 to 3.7)`."""
    base, kind = figures.base, figures.plan.kind
    speedup = figures.measured_speedup(one)
    verb = "is" if one.count == 1 else "are"
    other = base.count or "one process"
    text = f"{counted(kind, one.count)} {verb} {speedup:.2f} times as fast as {other}"
    found = interval(ratios(one, base))
    return text if found is None else f"{text} ({_span(found)})"


def _span(found: Interval) -> str:
    """`3.50 to 3.72`; fewer digits where they would say nothing: `0.05 to 30`."""
    if found[1] < 10 * found[0]:
        return f"{found[0]:.2f} to {found[1]:.2f}"
    return " to ".join(f"{float(f'{end:.1g}'):,g}" for end in found)


def _beyond(figures: Figures) -> str:
    """What the counts beyond the smallest one that is enough are good for."""
    enough, kind = figures.enough(), figures.plan.kind
    larger = [one for one in figures.counts if one.count > enough.count]
    if not larger:
        return ""
    what = "a gain cannot be told from the noise"
    if all(verdict(one, enough) == SLOWER for one in larger):
        what = "it gets slower"
    elif all((found := interval(ratios(one, enough))) and found[1] < GAIN for one in larger):
        what = "nothing is gained"
    return f"; beyond {counted(kind, enough.count)} {what}"


def named(part: str, figures: Figures) -> str:
    """The name of a part; between machines transfer is the network's."""
    return NETWORK if part == TRANSFER and figures.plan.kind != WORKERS else part


def bottleneck(figures: Figures) -> str:
    """What limits the speed at the largest count, what will limit it next, and what to change, in one sentence."""
    model = figures.model
    if model is None or not model.explains:
        return "not known: " + ("one count says nothing" if model is None else "the algorithm reports no times")
    last = figures.counts[-1]
    part, size = model.bottleneck(last.workers), f"at {counted(figures.plan.kind, last.count)} it is the"
    found = model.next_bottleneck(last.workers)
    if part not in (ENVIRONMENT, INFERENCE):
        return f"{size} {_with_share(part, figures)}; to change that: {ADVICE[named(part, figures)]}"
    text = f"{size} {_with_share(part, figures)}, which more {figures.plan.kind} shorten"
    if found is None:
        return f"{text}; no other is in sight"
    count = counted(figures.plan.kind, max(1, round(found[1] / figures.workers_per_count)))
    name = named(found[0], figures)
    return f"{text}; the next one, at about {count}, is the {_plural(name)}; to change that: {ADVICE[name]}"


def _plural(name: str) -> str:
    return "number of cores" if name == CORES else name


def _with_share(part: str, figures: Figures) -> str:
    """`learner (61 % of the time)`; what the cores take is no share of its own."""
    shares = figures.counts[-1].shares
    name = _plural(named(part, figures))
    return f"{name} ({shares[part]:.0%} of the time)" if part in shares else name


def notes(figures: Figures, load: float | None) -> list[str]:
    """What to mind when the figures are read."""
    plan, cores = figures.plan, figures.setting.cores
    found = [f"{counted(plan.kind, one.count)} failed: {one.problem}" for one in figures.failed]
    failed = {one.count for one in figures.failed}
    cut = [count for count in plan.counts if count not in failed and len(figures.rounds_of(count)) < plan.rounds]
    if cut:
        found.append(f"interrupted: not all {plan.rounds} rounds of {', '.join(map(str, cut))} were measured")
    if len(figures.counts) > 1:
        found += _work_notes(figures)
    if plan.kind == WORKERS and cores is not None and (many := [n for n in plan.counts if n > cores]):
        found.append(f"{', '.join(map(str, many))} workers share {cores:g} cores")
    if load is not None and cores is not None and load > 0.25 * cores:
        found.append(f"the machine was busy before it began (load {load:.1f} on {cores:g} cores): repeat it when idle")
    short = [f"{one.run}: {one.note}" for count in figures.counts for one in count.rounds if one.note]
    return [*found, *short, *_target_notes(figures)]


def _work_notes(figures: Figures) -> list[str]:
    """How the work per sample differs between counts: a speedup in samples is then not one in learning."""
    first, last = figures.base, figures.counts[-1]
    kind, found = figures.plan.kind, []
    batches = first.mean("samples_per_iteration"), last.mean("samples_per_iteration")
    if figures.setting.overlaps:
        batches = None, None  # rows are of a length of time
    if batches[0] and batches[1] and not 1 / DIFFERENT < batches[1] / batches[0] < DIFFERENT:
        found.append(
            f"the policy is renewed every {batches[0]:,.0f} samples with {counted(kind, first.count)}, every "
            f"{batches[1]:,.0f} with {last.count}: as many samples may teach less"
            + ("" if figures.plan.target is not None else "; --target measures learning")
        )
    updates = [(one.mean("updates_per_second") or 0.0) / one.rate for one in (first, last)]
    if all(updates) and not 1 / DIFFERENT < updates[1] / updates[0] < DIFFERENT:
        found.append(
            f"a gradient step is taken for every {1 / updates[0]:.3g} samples with {counted(kind, first.count)}, for "
            f"every {1 / updates[1]:.3g} with {last.count}: the work per sample differs"
        )
    return found


def _target_notes(figures: Figures) -> list[str]:
    plan = figures.plan
    if plan.target is None:
        return []
    missed = [
        f"{counted(plan.kind, one.count)}: {sum(run.target_seconds is None for run in one.rounds)} of {len(one.rounds)}"
        for one in figures.counts
        if any(run.target_seconds is None for run in one.rounds)
    ]
    if not missed:
        return []
    limit = f"within {format_duration(plan.longest)}"
    return [f"the return {format_number(plan.target)} was not reached {limit} in some runs ({', '.join(missed)})"]


def speedup_words(figures: Figures, one: Count) -> str:
    """`3.61 (3.5 to 3.7)`, marked where the difference is none."""
    if one is figures.base:
        return "1"
    found = interval(ratios(one, figures.base))
    text = f"{figures.measured_speedup(one):.2f}"
    if found is None:
        return text
    noise = ", noise" if verdict(one, figures.base) == NOISE else ""
    return f"{text} ({_span(found)}{noise})"
