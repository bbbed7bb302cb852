"""Results of commands for `--json`: typed values under fixed keys, as docs/json.md lists them.

A key is there whatever the outcome; what does not apply or is not known is null, or an empty list. Names of metrics,
configurations and trials are values, never parts of a key.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from tunediff.analysis import Results, without_seed
from tunediff.analysis.comparison import SPEEDUP, Comparison, Group, speedup_values
from tunediff.analysis.confirmation import Confirmation
from tunediff.analysis.evidence import Evidence
from tunediff.analysis.pairs import Pairs
from tunediff.analysis.statistics import Difference, Estimate, is_wide, mean, sd
from tunediff.core import trial_record as record
from tunediff.core.trial_record import TrialRecord
from tunediff.report import verdicts
from tunediff.report.study_table import Table

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
    known: Evidence, block: Mapping[str, Any], studied: Table | None = None, longer: Sequence[Comparison] = ()
) -> dict[str, Any]:
    """Return the result of a search. `block`: what `summary.values` says of its costs and files."""
    found, best, compared = known.found, known.best, known.compared
    statuses = collections.Counter(trial.status or "unfinished" for trial in found.trials)
    noise = known.noise
    return {
        "search": found.folder.name,
        "metric": found.label,
        "objective": found.metric,
        "direction": found.space.mode,
        "cost_metric": found.space.cost,
        "seeds": found.space.seeds,
        "trials": len(found.trials),
        "statuses": {status: statuses[status] for status in (*record.STATUSES, "unfinished")},
        **_best(known, best),
        **_speedup(known, best, block),
        "noise": None if noise is None else {
            "sd": noise.sd, "relative": noise.ratios, "runs": noise.runs, "configurations": noise.configurations,
            "rough": noise.rough,
        },
        "within_noise_of_best": [trial.name for trial in known.near],
        "better_than_noise": known.better(best) if best is not None else None,
        "nothing_to_confirm": block.get("nothing_to_confirm"),
        "disturbed_trials": block.get("disturbed_trials", 0),
        "unmoved_trials": block.get("unmoved_trials", 0),
        **_confirmed(known.told),
        "configurations": _rows(compared),
        "conclusions": verdicts.conclusions(compared) if compared is not None else [],
        "study_rows": records(studied.frame()) if studied is not None else [],
        "pareto_rows": _pareto(found),
        "longer_budgets": [_longer(one) for one in longer],
        **{name: block.get(name) for name in (*COSTS, *FILES)},
    }  # fmt: skip


def compare(told: Pairs, failure: str | None, wall_s: float, report: str) -> dict[str, Any]:
    """Return the result of a comparison of two configurations. `failure`: which run failed, and why."""
    look, values = told.look, told.values
    ended = [run for pair in told.runs for run in pair if run is not None and run.finished]
    sides = dict[str, Any]()
    for row, side in enumerate("ab"):
        known = [float(value) for value in values[row] if value == value]
        sides |= {f"{side}_value": mean(known), f"{side}_sd": sd(known), f"{side}_values": known}
    return {
        "comparison": told.folder.name,
        "a": told.asked[0],
        "b": told.asked[1],
        "changed": told.changed,
        "verdict": told.verdict,
        "failure": failure,
        "metric": told.label,
        "objective": told.metric.name,
        "direction": told.metric.mode,
        **sides,
        **effects(look.differences[0], look.ratios),
        "resolution": look.resolution,
        "one_run_each_tells": told.one_run_tells,
        "rough": told.rough,
        "stopped": look.state,
        "pairs": look.rounds,
        "pairs_at_most": told.most,
        "runs": len(ended),
        "training_s": told.trained_s,
        "wall_s": wall_s,
        "results": str(told.folder),
        "report": report,
    }


def effects(difference: Difference, ratios: bool) -> dict[str, float | None]:
    """Return a ratio with its interval, or a difference with its own; the other is None, as is what is too wide."""
    ends = (difference.estimate, difference.low, difference.high)
    if ratios and is_wide(difference.low, difference.high):
        ends = (None, None, None)
    known = dict(zip(EFFECTS[:3] if ratios else EFFECTS[3:], ends, strict=True))
    return {name: known.get(name) for name in EFFECTS}


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return rows in JSON types; what is missing is null."""
    rows: list[dict[str, Any]] = json.loads(table.to_json(orient="records"))
    return rows


# ------------------------------------------------------------------------------------------------------------ its parts
def _best(known: Evidence, best: TrialRecord | None) -> dict[str, Any]:
    """The best configuration beside the baseline; values are means over the runs of each in the search."""
    compared = known.compared
    groups: tuple[Group | None, Group | None] = (None, None)
    if compared is not None:
        groups = (compared.of(best) if best is not None else None, compared.baseline)
    values = [
        group.values(compared.metric) if compared is not None and group is not None else known.runs(trial)
        for group, trial in zip(groups, (best, known.baseline), strict=True)
    ]
    return {
        "best_trial": best.name if best is not None else None,
        "best_configuration": without_seed(known.found.changed(best)) if best is not None else None,
        "best_verdict": groups[0].difference.verdict if groups[0] is not None else None,
        "best_value": mean(values[0]),
        "best_values": values[0],
        "baseline_value": mean(values[1]),
        "baseline_values": values[1],
    }


def _speedup(known: Evidence, best: TrialRecord | None, block: Mapping[str, Any]) -> dict[str, Any]:
    speedup = known.speedup(best) if best is not None else "no trial has a result"
    single = isinstance(speedup, Estimate) and speedup.runs == 1
    return {
        **speedup_values(speedup),
        "speedup_means": block.get("speedup_means"),
        "speedup_unknown": speedup if isinstance(speedup, str) else None,
        "seconds_to_baseline": known.seconds_to_baseline(best) if single and best is not None else None,
    }


def _confirmed(told: Confirmation | None) -> dict[str, Any]:
    """What new seeds show: of the winner, else of the finalist that was ahead in the search."""
    group = told.leader if told is not None else None
    values = told.values(group) if told is not None and group is not None else []
    of_base = told.values(told.compared.baseline) if told is not None and told.compared.baseline is not None else []
    bias = told.bias(group) if told is not None and group is not None else None
    ratios = told.compared.ratios if told is not None else True
    shown = effects(group.difference if group is not None else Difference(), ratios)
    return {
        "confirmed": told.winner is not None if told is not None else None,
        "winner": told.winner.changed if told is not None and told.winner is not None else None,
        "finalist": group.changed if told is not None and told.winner is None and group is not None else None,
        "confirmed_metric": told.label if told is not None else None,
        "confirmed_value": mean(values),
        "confirmed_sd": sd(values),
        "confirmed_values": values,
        "confirmed_baseline_value": mean(of_base),
        "confirmed_baseline_sd": sd(of_base),
        "confirmed_baseline_values": of_base,
        **{f"confirmed_{name}": value for name, value in shown.items()},
        "value_when_chosen": bias[0] if bias is not None else None,
        "value_on_new_seeds": mean(bias[1]) if bias is not None else None,
        "confirmed_configurations": _rows(told.compared if told is not None else None),
    }


def _rows(compared: Comparison | None) -> list[dict[str, Any]]:
    """A row for each configuration with several seeds, the baseline first."""
    if compared is None:
        return []
    tables = records(compared.table())
    return [
        {
            "configuration": group.changed,
            "runs": row["runs"],
            "finished": row["finished"],
            "value": row[f"{compared.metric}_mean"],
            "sd": row[f"{compared.metric}_sd"],
            "values": group.values(compared.metric),
            **effects(group.difference, compared.ratios),
            **{name: row[name] for name in ("p", "p_holm", "verdict", *SPEEDUP, "samples_per_s", "cost")},
            "other_metrics": {
                name: {"value": row[f"{name}_mean"], "sd": row[f"{name}_sd"]} for name in compared.found.judged
            },
        }
        for group, row in zip(compared.groups, tables, strict=True)
    ]


def _pareto(found: Results) -> list[dict[str, Any]]:
    if found.space.cost is None:
        return []
    return [
        {
            "trial": trial.name,
            "configuration": found.changed(trial),
            "value": trial.value(found.metric),
            "cost": trial.value(found.space.cost),
            "versus_baseline": found.versus_baseline(trial),
        }
        for trial in found.pareto
    ]


def _longer(compared: Comparison) -> dict[str, Any]:
    return {"budget_s": compared.found.space.budget.per_trial_s, "rows": _rows(compared)}
