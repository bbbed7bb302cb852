"""Read the result of the experiment in a folder, with its sentences; draws nothing."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tunediff import analysis
from tunediff.analysis import (
    Results,
    confirming_runs,
    disturbed_count,
    evidence,
    journals,
    seconds_of,
    sides,
    speed,
)
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.confirming_runs import nothing_to_confirm
from tunediff.analysis.evidence import Evidence
from tunediff.analysis.outcome import Candidate as Compared
from tunediff.analysis.outcome import Outcome
from tunediff.analysis.pareto import pareto
from tunediff.analysis.statistics import Difference, Estimate, mean, sd, totals
from tunediff.core import environment, text
from tunediff.core.clock import ClockSummary
from tunediff.core.files import study_url
from tunediff.core.journal import to_json
from tunediff.core.outcomes import Status, Verdict
from tunediff.core.target import TIME_TO_TARGET
from tunediff.core.trial_record import TrialRecord
from tunediff.experiment.model import Experiment
from tunediff.report import sentences
from tunediff.report.result import (
    PAGE,
    Candidate,
    Effect,
    Failure,
    Kind,
    Ledger,
    NoiseOfRun,
    Result,
    Rule,
    Search,
    Sides,
    SpeedUp,
)
from tunediff.tuning import sessions


def of_search(known: Evidence) -> Result:
    """Return the result of a search."""
    results, study, said = known.results, list[dict[str, Any]](), list[str]()
    if results.space.study is not None:
        from tunediff.report import study as studies  # imports matplotlib

        frame = studies.table(results).frame().astype(object)
        study = json.loads(
            to_json(text.finite(frame.where(frame.notna(), None).to_dict("records")))
        )
    if left_out := journals.not_begun(results, journals.sessions(results.folder)):
        said.append(f"Not begun: {left_out}.")
    if known.confirmation is None and nothing_to_confirm(results):
        said.append(sentences.NOTHING_TO_CONFIRM)
    return _told(_of_search(known, study), said)


def of_sides(comparison: Comparison) -> Result:
    """Return the result of a comparison of two sides."""
    return _told(_of_sides(comparison), [])


def of_folder(folder: Path) -> Result:
    """Return the result of the experiment in a folder. Raises `ConfigError`."""
    if Experiment.read(folder).kind == "comparison":
        return of_sides(Comparison.read(folder))
    return of_search(evidence.read(analysis.read(folder)))


def _told(found: Result, more: list[str]) -> Result:
    return found.model_copy(update={"summary": [*sentences.summary(found), *more]})


def as_json(found: Result) -> dict[str, Any]:
    """Return a result as `--json` prints it."""
    return text.versioned(found.model_dump())


def flat_of(folder: Path) -> dict[str, Any]:
    """Return what trackers show of the result in a folder: one value for each key."""
    found = of_folder(folder)
    by, best, base = found.counts, found.leader, found.baseline
    values: dict[str, Any] = {
        "verdict": by.verdict,
        "best": found.best,
        "headline": found.summary[0],
    }
    for role, one in (("best", best), ("baseline", base)):
        if one is not None:
            values |= {f"{role}_trial": one.trial, f"{role}_value": one.value}
    seconds = {f"{part}_s": spent_s for part, spent_s in found.seconds.items()}
    return values | seconds | {"device_s": found.device_s, "price": found.price}


# ---- parts
def effect_of(difference: Difference, ratios: bool) -> Effect | None:
    """Return a difference as it is printed; None: the baseline's, or unknown."""
    if difference.estimate is None:
        return None
    names = ("low", "high", "resolution", "p", "p_holm")
    return Effect(
        kind="ratio" if ratios else "difference",
        value=difference.estimate,
        **{name: getattr(difference, name) for name in names},
    )


def _speedup(found: Estimate | None) -> SpeedUp | None:
    if found is None:
        return None
    ends = (None, None, None) if found.at_least else (found.mean, found.low, found.high)
    return SpeedUp(value=ends[0], low=ends[1], high=ends[2], at_least=found.bound)


def candidate_of(comparison: Comparison, one: Compared, **more: Any) -> Candidate:
    """Return a candidate of a comparison, as its journals and its rules have it."""
    row, compared = comparison.candidates.index(one), comparison.values
    values = [float(value) for value in compared[row] if np.isfinite(value)]
    missed = comparison.missed(one)
    middle = float(np.nanmedian(compared[row])) if missed else mean(values)
    rates, base = speed.rates(one), comparison.baseline
    rate, base_rate = mean(rates), mean(speed.rates(base)) if base is not None else None
    others = {comparison.metric: one.values(comparison.metric)} if comparison.rules.by_time else {}
    if comparison.of_search is not None:
        others = {name: one.values(name) for name in comparison.results.judged}
    fields: dict[str, Any] = {
        "name": one.name,
        "configuration": one.changed,
        "trial": one.done[0].name if one.done else None,
        "verdict": one.verdict,
        "runs": len(one.runs),
        "failures": len(one.outcome.failures),
        "missed": missed,
        "value": middle if middle != math.inf else None,
        "sd": None if missed else sd(values),
        "values": values,
        "effect": effect_of(one.difference, comparison.ratios),
        "speedup": _speedup(comparison.speedup(one)),
        "others": others,
        "samples_per_s": rate,
        "cost": base_rate / rate if rate and base_rate else None,
    }
    return Candidate(**fields | more)


def rule_of(comparison: Comparison) -> Rule:
    rules = comparison.rules
    return Rule(
        level=rules.level,
        one_sided=rules.one_sided,
        fixed=rules.fixed,
        within=rules.within,
        better_in=rules.better,
        target=str(rules.target) if rules.target is not None else None,
        margin=rules.margin,
        equal_sides=rules.equal,
        rounds=comparison.analysis.rounds,
        max_rounds=rules.max_rounds,
        at_once=comparison.at_once,
    )


def measured(comparison: Comparison) -> dict[str, Any]:
    """Return the keys of a result of two sides that follow from the journals and rules alone."""
    keys = {"verdict", "runs", "value", "sd", "values", "effect", "others"}
    candidates = [candidate_of(comparison, one) for one in comparison.candidates]
    return {
        "verdict": comparison.verdict,
        "state": comparison.state,
        "rule": rule_of(comparison).model_dump(),
        "candidates": [one.model_dump(include=keys) for one in candidates],
        "sides": _quality(comparison),
    }


def _quality(comparison: Comparison) -> dict[str, Any]:
    """Return what is shown of B's values, for its seconds to count."""
    gates = [gate._asdict() for gate in comparison.gates]
    return {"gates": gates, "target_p": comparison.target_p}


def _of_sides(comparison: Comparison) -> Result:
    """Return the result of a comparison of two sides."""
    folder, rules, limit = comparison.folder, comparison.rules, comparison.experiment.limit
    code, holdout = (sides.content(folder, name) for name in (sides.CODE, sides.HOLDOUT_VALUES))
    ledger, is_command = sides.content(folder, sides.LEDGER), sides.of_commands(folder)
    candidates, results = [], list[int]()
    for one, name, setup_s in zip(
        comparison.candidates, comparison.names, sides.setup_s(comparison), strict=True
    ):
        counts = [
            run.points[-1].samples if is_command else len(run.points)
            for run in one.runs
            if run.points
        ]
        results += counts
        found = candidate_of(
            comparison,
            one,
            name=name,
            configuration={} if one.is_baseline else sides.changed(comparison),
            setup_s=setup_s,
            evaluations=float(np.median(counts)) if counts else None,
            digest=code[one.name]["digest"] if code else None,
            holdout=holdout.get(one.name, []),
        )
        candidates.append(found)
    a, b = comparison.values[:, ~np.isnan(comparison.values).any(axis=0)]
    is_ahead = b < a if comparison.lower_is_better else b > a
    # Of blocks a process is several runs, and their mean its value
    is_block = is_command and any("each" in one.definition.reduce for one in comparison.configs)
    by_target = TIME_TO_TARGET if rules.counted == "first" else "train_s"
    return Result(
        **_common(comparison.runs, sides.clocked(comparison), sessions.spent_s(folder)),
        name=folder.name,
        kind="comparison",
        objective=by_target if rules.by_time else comparison.metric,
        metric=sides.outcome_label(comparison),
        direction="min" if comparison.lower_is_better else "max",
        target=str(rules.target) if rules.target is not None else None,
        budget_s=limit.budget,
        budget_unit=limit.unit,
        best=candidates[comparison.verdict == Verdict.BETTER].name,
        candidates=candidates,
        **_tested(comparison),
        files={"results": str(folder), "report": str(folder / PAGE)},
        sides=Sides(
            one_run_each_tells=sides.one_run_detects(comparison),
            first_seed=None
            if rules.unseeded
            else code.get("first_seed", comparison.configs[0].seed),
            seeds_drawn=code.get("drawn", False),
            unseeded=rules.unseeded,
            without_effect=sides.without_effect(comparison),
            results_per_process=[min(results), max(results)] if is_block and results else [],
            ahead=[int(is_ahead.sum()), len(a)],
            **_quality(comparison),
            judge_digest=comparison.experiment.judge,
            holdout_failure=holdout.get("failure"),
            ledger=Ledger(**{k: v for k, v in ledger.items() if k not in ("file", "id")})
            if ledger
            else None,
        ),
    )


def _tested(comparison: Comparison) -> dict[str, Any]:
    """Return what all comparisons have: verdict, state, rule, failure."""
    failed, failure = comparison.failure, None
    if failed is not None:
        owner = next(one for one in comparison.candidates if failed in one.runs)
        failure = Failure(
            candidate=owner.name,
            seed=failed.seed,
            status=failed.status or Status.UNFINISHED,
            reason=failed.reason,
        )
    return {
        "verdict": comparison.verdict,
        "state": comparison.state,
        "rule": rule_of(comparison),
        "rough": comparison.noise_is_rough,
        "failure": failure,
    }


def _common(runs: list[TrialRecord], clock: ClockSummary, wall_s: float) -> dict[str, Any]:
    """Return what any result says of its runs and their seconds."""
    ended, parts = [run for run in runs if run.finished], totals([seconds_of(run) for run in runs])
    seconds = {"wall": wall_s, **{part: parts.get(part, 0.0) for part in sorted(parts)}}
    others = disturbed_count(ended)
    # Neither a command nor a trial that was asked for counts steps: they report values instead
    ours = [run for run in ended if others is not None and "threads" in run.environment]
    trained = [run.points[-1].steps for run in ours if run.status == Status.OK and run.points]
    workers = (
        f"{environment.hardware(run.environment)}, "
        + text.pluralize(run.environment["threads"], "thread")
        for run in ours
    )
    return {
        "clock": clock.kind,
        "start_up_share": clock.start_up_share,
        "runs": len(ended),
        "disturbed": others,
        "fewest_steps": min(trained, default=None),
        "workers": list(dict.fromkeys(workers)),
        "seconds": seconds,
        "device_s": None,
        "price": None,
    }


def _of_results(results: Results, kind: Kind) -> dict[str, Any]:
    """Return what a search and its confirming runs have in common."""
    space, folder = results.space, results.folder
    return _common(results.trials, results.clocked, sessions.all_spent_s(folder)) | {
        "name": folder.name,
        "kind": kind,
        "objective": results.metric,
        "metric": results.label,
        "direction": space.mode,
        "target": str(results.target) if results.target is not None else None,
        "budget_s": space.budget.per_trial_s,
        "budget_unit": space.budget.unit,
        **results.used(),
    }


def of_confirmation(comparison: Comparison) -> Result:
    """Return what the confirming runs of a search have shown."""
    leader, rated = comparison.leader, list[Candidate]()
    for one in comparison.candidates:
        bias = confirming_runs.bias(comparison, one)
        chosen = bias[0] if bias is not None and not one.is_baseline else None
        rated.append(candidate_of(comparison, one, value_when_chosen=chosen))
    common = _of_results(comparison.results, "confirmation") | _tested(comparison)
    winner = comparison.winner
    verdict = Verdict.BETTER if winner is not None else comparison.verdict
    return Result(
        **common | {"objective": comparison.metric, "metric": comparison.label, "verdict": verdict},
        best=leader.name if leader is not None else None,
        candidates=rated,
        files={"results": str(comparison.results.folder)},
    )


def _of_search(evidence: Evidence, study: list[dict[str, Any]] | None = None) -> Result:
    """Return the result of a search with its confirming runs; `study`: the rows of its table."""
    results, best, compared = evidence.results, evidence.best, evidence.compared
    confirmed = evidence.confirmation
    tests = [confirmed, *confirmed.others] if confirmed is not None else []
    confirmations = [of_confirmation(test) for test in tests]
    fields = _of_results(results, "search")
    for runs in confirmations:  # what a search says of its runs is of its confirming runs too
        parts = {k: v for k, v in runs.seconds.items() if k != "wall"}
        fields["seconds"] = totals([fields["seconds"], parts])
        fields["workers"] = list(dict.fromkeys([*fields["workers"], *runs.workers]))
        for key in ("device_s", "price"):
            fields[key] = sum(filter(None, [fields[key], getattr(runs, key)])) or None
    if compared is not None:
        tested = _tested(compared)
        candidates = [candidate_of(compared, one) for one in compared.candidates]
        leading = compared.candidate_of(best) if best is not None else None
        name = leading.name if leading is not None else None
    else:
        tested = {"verdict": None, "state": None, "rule": None, "failure": None}
        tested["rough"] = evidence.noise is None or evidence.noise.is_rough
        outcomes = [evidence.outcome(one) for one in (evidence.baseline, best) if one is not None]
        shown = {id(one): one for one in [*outcomes, *evidence.set_aside]}
        candidates = [_once(evidence, outcome) for outcome in shown.values()]
        name = text.knobs(results.changed(best)) if best is not None else None
    verdict = confirmations[0].verdict if confirmations else tested["verdict"]
    return Result(
        **fields | tested | {"verdict": verdict},
        best=name,
        candidates=candidates,
        files=_files(evidence),
        search=_search(evidence, study or []),
        confirmations=confirmations,
    )


def _once(evidence: Evidence, outcome: Outcome) -> Candidate:
    """Return a configuration of a search that runs each once, or few times."""
    results, trial = evidence.results, outcome.trial
    changed, base = results.changed(trial), evidence.baseline
    of_base = evidence.outcome(base).value if base is not None else None
    ratio = results.versus(outcome.value, of_base) if changed else None
    kind: Literal["ratio", "difference"] = "ratio" if results.ratios else "difference"
    return Candidate(
        name=text.knobs(changed),
        configuration=changed,
        trial=trial.name,
        verdict=None,
        runs=len(outcome.runs),
        failures=len(outcome.failures),
        value=outcome.value,
        sd=sd(outcome.values),
        values=outcome.values,
        effect=Effect(kind=kind, value=ratio) if ratio is not None else None,
        speedup=_speedup(evidence.speedup(trial)),
        samples_per_s=speed.rate(trial),
    )


def _search(evidence: Evidence, study: list[dict[str, Any]]) -> Search:
    results, best, noise = evidence.results, evidence.best, evidence.noise
    statuses = Counter(trial.status or Status.UNFINISHED for trial in results.trials)
    planned = results.space.budget.trials
    ended = bool(journals.not_begun(results, journals.sessions(results.folder)))
    return Search(
        trials=len(results.trials),
        statuses={status: statuses[status] for status in Status if statuses[status]},
        cost_metric=results.space.cost,
        seeds=results.space.seeds,
        better_than_noise=evidence.better(best) if best is not None else None,
        noise=NoiseOfRun(
            sd=noise.sd,
            relative=noise.ratios,
            runs=noise.runs,
            configurations=noise.configurations,
            rough=noise.is_rough,
        )
        if noise is not None
        else None,
        within_noise_of_best=[one.name for one in evidence.near if not evidence.is_baseline(one)],
        seconds_to_baseline=evidence.seconds_to_baseline(best) if best is not None else None,
        not_begun=planned - len(results.trials) if ended else 0,
        pareto=[dict(row) for row in pareto(results)],
        study=study,
    )


def _files(evidence: Evidence) -> dict[str, str]:
    """Return the files that a search has written, and the commands that continue from here."""
    folder, best = evidence.results.folder, evidence.best
    names = {"table": "trials.csv", "curves": "curves.csv", "comparison": "comparison.csv",
             "pareto": "pareto.csv", "study": "study.csv", "study_figure": "study.png",
             "samples": f"trials/{best.name}/samples.png" if best is not None else "samples.png",
             "report": PAGE}  # fmt: skip
    files = {key: str(folder / name) for key, name in names.items() if (folder / name).is_file()}
    files = {"results": str(folder), "optuna": study_url(folder / "study.db"), **files}
    if best is not None:
        files["export"] = text.command("export", folder.name, storage=folder.parent)
    return {"report": text.command("report", folder.name, storage=folder.parent), **files}
