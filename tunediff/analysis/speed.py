"""How fast trials were: rates, the parts of a step, when torch.compile pays, and what speed costs in quality."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping

import pandas as pd

from tunediff.analysis import RATE, Results, front, last, seconds_of, without_seed
from tunediff.analysis.statistics import mean
from tunediff.core.trial_record import TrialRecord


def rate(trial: TrialRecord) -> float | None:
    """Samples per second at the last evaluation."""
    return float(value) if (value := last(trial, RATE)) else None


def batch_size(trial: TrialRecord) -> int | None:
    """Samples per optimizer step."""
    size = trial.config.get("loader.batch_size")
    return size if isinstance(size, int) and size > 0 else None


def compile_s(trial: TrialRecord) -> float | None:
    """Seconds of compiling and of the warm-up step; None where there was no compiling."""
    return float(spent) if (spent := seconds_of(trial).get("compile")) else None


def per_thousand(trial: TrialRecord) -> dict[str, float]:
    """Seconds of each part of the step per 1,000 samples, so that trials of other batch sizes can be compared.

    Over the last evaluation interval; {} where they were not recorded.
    """
    size = batch_size(trial)
    spent = trial.points[-1].phases_s if trial.points else {}
    return {part: 1000 * float(value) / size for part, value in spent.items() if size}


# ------------------------------------------------------------------------------------------------------------- compile
@dataclasses.dataclass(frozen=True)
class Compiled:
    """A configuration under torch.compile, and beside it the same without, if that ran as well."""

    trial: str
    mode: str
    uncompiled: str | None
    uncompiled_samples_per_s: float | None
    compile_s: float | None
    samples_per_s: float | None
    versus_uncompiled: float | None = None
    samples_to_break_even: float | None = None
    break_even_s: float | None = None
    """Training seconds, compilation included, after which it has seen as many samples as without compilation."""
    graphs: int | None = None
    expected_graphs: int | None = None
    """Different calls of what was compiled, each of which needs a graph."""


def compiled(found: Results) -> list[Compiled]:
    """Every configuration under torch.compile, in order of its first trial; rates are means over its runs."""
    alike: dict[str, list[list[TrialRecord]]] = {}
    for runs in found.groups:
        if "parallel.workers" in runs[0].config:
            same = {name: v for name, v in without_seed(runs[0].config).items() if not name.startswith("compile.")}
            alike.setdefault(json.dumps(same, sort_keys=True, default=str), []).append(runs)
    lines = []
    for group in alike.values():
        plain = next((runs for runs in group if not _compiles(runs[0])), None)
        lines += [_compiled(runs, plain) for runs in group if _compiles(runs[0])]
    return lines


def _compiles(trial: TrialRecord) -> bool:
    return bool(trial.config.get("compile.mode", "none") != "none")


def _compiled(runs: list[TrialRecord], plain: list[TrialRecord] | None) -> Compiled:
    name, mode, fast, cost = runs[0].name, runs[0].config["compile.mode"], _mean(runs, rate), _mean(runs, compile_s)
    graphs = {to: last(runs[0], of) for to, of in (("graphs", "compiled_graphs"), 2 * ("expected_graphs",))}
    if plain is None:  # nothing to compare with
        return Compiled(name, mode, None, None, cost, fast, **graphs)
    slow = _mean(plain, rate)
    ratio = fast / slow if fast and slow else None
    paid = break_even(cost, fast, ratio)
    return Compiled(name, mode, plain[0].name, rate(plain[0]), cost, fast, ratio, *(paid or (None, None)), **graphs)


def break_even(cost_s: float | None, rate: float | None, ratio: float | None) -> tuple[float, float] | None:
    """(samples, training seconds) from which on compiling has paid that makes it `ratio` times as fast; None: never."""
    if cost_s is None or not rate or not ratio or ratio <= 1:
        return None
    # n samples take n/r without compilation and c + n/(f·r) with it: equal at n = c·f·r/(f−1).
    samples = cost_s * rate / (ratio - 1)
    return samples, cost_s + samples / rate


def predicted_step_s(one: Mapping[str, float], two: Mapping[str, float], devices: int) -> float:
    """Seconds of a step on so many alike devices under `ddp`, from those of one and of two, all of the same batch.

    step(n) = compute(n) + exposed(n) + rest; with `devices` = 2 that is what was measured. Of one and two devices known
    are `step_s`, `step_forward_s` and `step_backward_s`.
    compute(n) = (φ + (1 − φ)/n)·(forward(1) + backward(1)): the share φ, 0 to 1, is what a smaller batch does not
    shorten. Forward passes tell it, as nothing is sent in them: forward(2) / forward(1) = φ + (1 − φ)/2.
    exposed(n) = exposed(2)·2(n − 1)/n, what sending adds to the passes: a ring all-reduce sends 2(n − 1)/n of the
    gradients' bytes from each device (Patarasuk and Yuan 2009, J. Parallel Distrib. Comput. 69, 117), at the bandwidth
    that two have reached, and as much of it hidden behind the backward pass as there: more devices hide less.
    rest = that of two: the optimizer updates all weights on each device.
    """
    passes, of_two = (run["step_forward_s"] + run["step_backward_s"] for run in (one, two))
    ratio = min(1.0, max(0.5, two["step_forward_s"] / one["step_forward_s"]))
    fixed, exposed_s = 2 * ratio - 1, max(0.0, of_two - ratio * passes)
    compute_s, rest_s = passes * (fixed + (1 - fixed) / devices), two["step_s"] - of_two
    return compute_s + exposed_s * 2 * (devices - 1) / devices + rest_s


def _mean(runs: list[TrialRecord], of: Callable[[TrialRecord], float | None]) -> float | None:
    counted = [trial for trial in runs if trial.status == "ok"] or [trial for trial in runs if not trial.finished]
    return mean([value for trial in counted if trial.points and (value := of(trial)) is not None])


# ---------------------------------------------------------------------------------------------------------- trade-offs
def trade_offs(found: Results) -> pd.DataFrame:
    """One row per trial that ended ok: objective, samples/s, memory, and on which fronts it lies.

    Of a search with another second objective, that as well.
    """
    signs = {RATE: -1.0, "peak_memory_mib": 1.0} | ({found.space.cost: 1.0} if found.space.cost is not None else {})
    signs.pop(found.metric, None)
    rows = [
        [trial.name, trial.value(found.metric), *(rate(trial) if n == RATE else last(trial, n) for n in signs)]
        for trial in found.ranked
    ]
    frame = pd.DataFrame(rows, columns=["trial", found.metric, *signs])
    for name, sign in signs.items():
        known = frame[name].notna()
        pairs = [(found.loss(a), sign * b) for a, b in zip(frame[found.metric][known], frame[name][known], strict=True)]
        frame[f"on_front_{name}"] = False
        if pairs:  # journals of another version, or a stranger's, may lack one of them throughout
            frame.loc[known, f"on_front_{name}"] = front(pairs)
    return frame
