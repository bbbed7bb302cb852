"""Build the results of commands for `--json`: typed values under fixed keys (`tunediff/schemas`).

Every key is always present; a value that does not apply or is unknown is null, or an empty list.
Names of metrics, configurations and trials are values, never parts of a key.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from tunediff.analysis import Results, disturbed
from tunediff.analysis.comparison import SPEEDUP, Comparison, speedup_values
from tunediff.analysis.confirmation import Confirmation, nothing_to_confirm
from tunediff.analysis.evidence import Evidence
from tunediff.analysis.journals import not_begun, sessions
from tunediff.analysis.noise import unmoved
from tunediff.analysis.outcome import failure_note, without_seed
from tunediff.analysis.pairs import Pairs
from tunediff.analysis.pareto import pareto
from tunediff.analysis.statistics import Difference, Estimate, is_wide, mean, sd
from tunediff.core import text
from tunediff.core import trial_record as record
from tunediff.core.journal import to_json
from tunediff.core.trial_record import TrialRecord
from tunediff.report import verdicts
from tunediff.report.headline import headline, of_confirmation
from tunediff.report.study_table import Table
from tunediff.report.words import with_sd

COSTS = (
    "wall_s", "training_s", "device_s", "energy_wh", "price", "data_wait_s", "compile_s", "evaluation_s",
    "checkpoint_s", "setup_s", "overhead_s", "training_share", "confirm_wall_s", "confirm_training_s",
)  # fmt: skip
FILES = (
    "results", "table", "curves", "comparison", "pareto", "study_table", "study_figure", "study", "samples",
    "confirmation", "export", "report",
)  # fmt: skip
EFFECTS = ("ratio", "ratio_low", "ratio_high", "difference", "difference_low", "difference_high")


def search(
    evidence: Evidence,
    more: Mapping[str, Any],
    studied: Table | None = None,
    longer: Sequence[Comparison] = (),
) -> dict[str, Any]:
    """Return the result of a search.

    more: its costs and files. studied: the table of its study. longer: comparisons of the finalists
    with longer budgets.
    """
    results, best, compared = evidence.results, evidence.best, evidence.compared
    statuses = collections.Counter(trial.status or "unfinished" for trial in results.trials)
    noise = evidence.noise
    return {
        "search": results.folder.name,
        "metric": results.label,
        "objective": results.metric,
        "direction": results.space.mode,
        "cost_metric": results.space.cost,
        "seeds": results.space.seeds,
        "trials": len(results.trials),
        "statuses": {status: statuses[status] for status in record.COUNTED},
        "headline": headline(evidence),
        **best_and_baseline(evidence),
        **_speedup(evidence, best),
        "noise": None if noise is None else {
            "sd": noise.sd, "relative": noise.ratios, "runs": noise.runs, "configurations": noise.configurations,
            "rough": noise.rough, "least_sd": noise.least, "largest_sd": noise.largest,
        },
        "within_noise_of_best": [trial.name for trial in evidence.near],
        "better_than_noise": evidence.better(best) if best is not None else None,
        "nothing_to_confirm": nothing_to_confirm(results) or None if evidence.confirmation is None else None,
        "not_begun": not_begun(results, sessions(results.folder)) or None,
        "disturbed_trials": sum(map(disturbed, results.trials)),
        "unmoved_trials": unmoved(results),
        **_confirmed(evidence.confirmation),
        "configurations": _rows(compared),
        "conclusions": verdicts.conclusions(compared) if compared is not None else [],
        "study_rows": records(studied.frame()) if studied is not None else [],
        "pareto_rows": pareto(results),
        "longer_budgets": [_longer(comparison) for comparison in longer],
        **{name: more.get(name) for name in (*COSTS, *FILES)},
    }  # fmt: skip


def compare(pairs: Pairs, failure: str | None, wall_s: float, report: str) -> dict[str, Any]:
    """Return the result of a comparison of two configurations.

    failure: which run failed, and why. wall_s: wall-clock in seconds. report: path of the page.
    """
    look, values = pairs.look, pairs.values
    ended = [run for pair in pairs.runs for run in pair if run is not None and run.finished]
    # Values of A and B over the pairs, without missing ones.
    sides = dict[str, Any]()
    for row, side in enumerate("ab"):
        numbers = [float(value) for value in values[row] if value == value]
        sides |= {
            f"{side}_value": mean(numbers),
            f"{side}_sd": sd(numbers),
            f"{side}_values": numbers,
        }
    return {
        "comparison": pairs.folder.name,
        "a": pairs.names[0],
        "b": pairs.names[1],
        "changed": pairs.changed,
        "verdict": pairs.verdict,
        "failure": failure,
        "metric": pairs.label,
        "objective": pairs.metric.name,
        "direction": pairs.metric.mode,
        **sides,
        **effects(look.differences[0], look.ratios),
        "resolution": look.differences[0].resolution,
        "one_run_each_tells": pairs.one_run_tells,
        "rough": pairs.rough,
        "stopped": look.state,
        "pairs": look.rounds,
        "pairs_at_most": pairs.most,
        "runs": len(ended),
        "disturbed_runs": sum(map(disturbed, ended)),
        "a_setup_s": pairs.setup_s[0],
        "b_setup_s": pairs.setup_s[1],
        "training_s": pairs.trained_s,
        "wall_s": wall_s,
        "results": str(pairs.folder),
        "report": report,
    }


def plain(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a result fits in lines of text, nothing that is null; means with their sd and
    with failures."""
    lines = dict[str, Any]()
    for name, value in result.items():
        if value is None or isinstance(value, list) or name.endswith(("_sd", "_failures")):
            continue
        if isinstance(value, bool):
            lines[name] = "yes" if value else "no"
        elif isinstance(value, float) and "ratio" in name:
            lines[name] = f"{value:.4g}"  # as close to 1 as its interval may end
        elif isinstance(value, dict):
            lines[name] = text.knobs(value)
        else:
            lines[name] = _mean_line(name, result) if f"{name}s" in result else value
    return lines


def _mean_line(name: str, result: Mapping[str, Any]) -> str:
    values, failures = result[f"{name}s"], result.get(f"{name.removesuffix('value')}failures", 0)
    return ", ".join(filter(None, [with_sd(values), failure_note(failures, len(values))]))


def effects(difference: Difference, ratios: bool) -> dict[str, float | None]:
    """Return the effect as a ratio or as a difference, with its interval.

    The keys of the other form are None; so are all keys of a ratio if its interval is too wide to
    be useful.
    """
    ends = (difference.estimate, difference.low, difference.high)
    if ratios and is_wide(difference.low, difference.high):
        ends = (None, None, None)
    values = dict(zip(EFFECTS[:3] if ratios else EFFECTS[3:], ends, strict=True))
    return {name: values.get(name) for name in EFFECTS}


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a table in JSON types; missing values are None."""
    rows = table.astype(object).where(table.notna(), None).to_dict("records")
    return [json.loads(to_json(text.finite(row))) for row in rows]


# ---- its parts
def best_and_baseline(evidence: Evidence) -> dict[str, Any]:
    """Return the best configuration and the baseline; values are means over the runs of each in the
    search."""
    compared, best = evidence.compared, evidence.best
    trials = (best, evidence.baseline)
    outcomes = [evidence.outcome(trial) if trial is not None else None for trial in trials]
    values = [outcome.values if outcome is not None else [] for outcome in outcomes]
    failures = [len(outcome.failures) if outcome is not None else 0 for outcome in outcomes]
    group = compared.of(best) if compared is not None and best is not None else None
    return {
        "best_trial": best.name if best is not None else None,
        "best_configuration": (
            without_seed(evidence.results.changed(best)) if best is not None else None
        ),
        "best_verdict": group.difference.verdict if group is not None else None,
        "best_value": mean(values[0]),
        "best_values": values[0],
        "best_failures": failures[0],
        "baseline_value": mean(values[1]),
        "baseline_values": values[1],
        "baseline_failures": failures[1],
    }


def _speedup(evidence: Evidence, best: TrialRecord | None) -> dict[str, Any]:
    speedup = evidence.speedup(best) if best is not None else "no trial has a result"
    single = isinstance(speedup, Estimate) and speedup.runs == 1
    return {
        **speedup_values(speedup),
        "speedup_means": (
            _speedup_means(evidence.results, speedup) if isinstance(speedup, Estimate) else None
        ),
        "speedup_unknown": speedup if isinstance(speedup, str) else None,
        "seconds_to_baseline": (
            evidence.seconds_to_baseline(best) if single and best is not None else None
        ),
    }


def _speedup_means(results: Results, speedup: Estimate) -> str:
    """Return how a speed-up was computed: as a lower bound, a mean with interval, or from one pair
    of runs."""
    ratio = f"baseline's {results.clock.seconds} / those of the best until as good"
    ratio = f"{results.unit}/s of the best / the baseline's" if results.by_rate else ratio
    over = f", geometric mean over {speedup.runs} seeds" if speedup.runs > 1 else ""
    if speedup.at_least:
        return (
            f"lower bound: {ratio}{over}; as good at the first evaluation already, there is no"
            " upper bound"
        )
    return f"{'mean with 95 % interval' if speedup.low else 'one pair of runs'}: {ratio}{over}"


def _confirmed(confirmation: Confirmation | None) -> dict[str, Any]:
    """Return the confirmed result of the winner, or, without one, of the best finalist that ran."""
    # Without confirming runs every key is there, with null or an empty list.
    winner = group = baseline = None
    if confirmation is not None:
        winner, group, baseline = (
            confirmation.winner,
            confirmation.leader,
            confirmation.compared.baseline,
        )
    values, of_base = (
        confirmation.values(runs) if confirmation is not None and runs is not None else []
        for runs in (group, baseline)
    )
    failures = [len(side.outcome.failures) if side is not None else 0 for side in (group, baseline)]
    bias = confirmation.bias(group) if confirmation is not None and group is not None else None
    ratios = confirmation is None or confirmation.compared.ratios
    shown = effects(group.difference if group is not None else Difference(), ratios)
    return {
        "confirmed": winner is not None if confirmation is not None else None,
        "winner": winner.changed if winner is not None else None,
        "finalist": group.changed if group is not None and winner is None else None,
        "confirmed_metric": confirmation.label if confirmation is not None else None,
        "confirmed_value": mean(values),
        "confirmed_sd": sd(values),
        "confirmed_values": values,
        "confirmed_failures": failures[0],
        "confirmed_baseline_value": mean(of_base),
        "confirmed_baseline_sd": sd(of_base),
        "confirmed_baseline_values": of_base,
        "confirmed_baseline_failures": failures[1],
        **{f"confirmed_{name}": value for name, value in shown.items()},
        "value_when_chosen": bias[0] if bias is not None else None,
        "value_on_new_seeds": mean(bias[1]) if bias is not None else None,
        "other_confirmations": [
            {
                "name": other.name,
                "verdict": of_confirmation(other),
                "winner": other.winner.changed if other.winner is not None else None,
            }
            for other in (confirmation.others if confirmation is not None else ())
        ],
        "confirmed_configurations": _rows(
            confirmation.compared if confirmation is not None else None
        ),
    }


def _rows(compared: Comparison | None) -> list[dict[str, Any]]:
    """Return one row per configuration with several seeds, the baseline first."""
    if compared is None:
        return []
    tables = records(compared.table())
    return [
        {
            "configuration": group.changed,
            "runs": row["runs"],
            "finished": row["finished"],
            "failures": row["failures"],
            "value": row[f"{compared.metric}_mean"],
            "sd": row[f"{compared.metric}_sd"],
            "values": group.values(compared.metric),
            **effects(group.difference, compared.ratios),
            **{
                name: row[name]
                for name in ("p", "p_holm", "verdict", *SPEEDUP, "samples_per_s", "cost")
            },
            "other_metrics": {
                name: {"value": row[f"{name}_mean"], "sd": row[f"{name}_sd"]}
                for name in compared.results.judged
            },
        }
        for group, row in zip(compared.groups, tables, strict=True)
    ]


def _longer(compared: Comparison) -> dict[str, Any]:
    return {"budget_s": compared.results.space.budget.per_trial_s, "rows": _rows(compared)}
