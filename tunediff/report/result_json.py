"""Build the results that commands print with `--json`: see `search_result` and `pair_result`."""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunediff.analysis import Results, disturbed_count
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.confirming_runs import bias, nothing_to_confirm
from tunediff.analysis.evidence import Evidence
from tunediff.analysis.journals import not_begun, sessions
from tunediff.analysis.noise import Noise
from tunediff.analysis.pareto import pareto
from tunediff.analysis.speed import SPEEDUP, speedup_values
from tunediff.analysis.statistics import Estimate, mean, sd
from tunediff.core import text
from tunediff.core.journal import to_json
from tunediff.core.outcomes import Status
from tunediff.report import verdicts
from tunediff.report.headline import headline, of_confirmation
from tunediff.report.search_result import (
    ConfigurationResult,
    ConfirmationResult,
    NoiseResult,
    ParetoResult,
    SearchResult,
)
from tunediff.report.study import StudyTable
from tunediff.report.words import effects

if TYPE_CHECKING:
    import pandas as pd


def search(
    evidence: Evidence,
    costs_and_files: Mapping[str, Any],
    studied: StudyTable | None = None,
) -> SearchResult:
    """Return the result of a search.

    costs_and_files: values of these keys. studied: the table of its study.
    """
    results, best, compared = evidence.results, evidence.best, evidence.compared
    statuses = collections.Counter(trial.status or Status.UNFINISHED for trial in results.trials)
    confirmation = evidence.confirmation
    return SearchResult(
        **_about(results),
        trials=len(results.trials),
        statuses={status: statuses[status] for status in Status},
        headline=headline(evidence),
        **_best_and_baseline(evidence),
        **_speedup(evidence),
        noise=_noise(evidence.noise),
        within_noise_of_best=[trial.name for trial in evidence.near],
        better_than_noise=evidence.better(best) if best is not None else None,
        nothing_to_confirm=nothing_to_confirm(results) or None if confirmation is None else None,
        not_begun=not_begun(results, sessions(results.folder)) or None,
        disturbed_trials=disturbed_count(results.trials),
        unmoved_trials=evidence.unmoved,
        **(_confirmed(confirmation) if confirmation is not None else {}),
        configurations=_configurations(compared) if compared is not None else [],
        conclusions=verdicts.conclusions(compared) if compared is not None else [],
        study_rows=records(studied.frame()) if studied is not None else [],
        pareto_rows=[ParetoResult(**row) for row in pareto(results)],
        **costs_and_files,
    )


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a table in JSON types; missing values are None."""
    rows = table.astype(object).where(table.notna(), None).to_dict("records")
    return [json.loads(to_json(text.finite(row))) for row in rows]


# ---- parts of the result of a search
def _about(results: Results) -> dict[str, Any]:
    """Return the keys that follow from the search file."""
    return {
        "search": results.folder.name,
        "metric": results.label,
        "objective": results.metric,
        "direction": results.space.mode,
        "cost_metric": results.space.cost,
        "target": str(results.target) if results.target is not None else None,
        "seeds": results.space.seeds,
    }


def _best_and_baseline(evidence: Evidence) -> dict[str, Any]:
    """Return the keys of the best configuration and of the baseline: means over their runs."""
    best, compared = evidence.best, evidence.compared
    keys = dict[str, Any]()
    for role, trial in (("best", best), ("baseline", evidence.baseline)):
        outcome = evidence.outcome(trial) if trial is not None else None
        values = outcome.values if outcome is not None else []
        keys |= {
            f"{role}_value": mean(values),
            f"{role}_values": values,
            f"{role}_failures": len(outcome.failures) if outcome is not None else 0,
        }
    group = compared.candidate_of(best) if compared is not None and best is not None else None
    changed = evidence.results.changed(best) if best is not None else None
    return keys | {
        "best_trial": best.name if best is not None else None,
        "best_configuration": changed,
        "best_verdict": group.difference.verdict if group is not None else None,
    }


def _speedup(evidence: Evidence) -> dict[str, Any]:
    best = evidence.best
    speedup = evidence.speedup(best) if best is not None else "no trial has a result"
    means = seconds_to_baseline = None
    if isinstance(speedup, Estimate) and best is not None:
        means = _speedup_means(evidence.results, speedup)
        seconds_to_baseline = evidence.seconds_to_baseline(best) if speedup.runs == 1 else None
    return {
        **speedup_values(speedup),
        "speedup_means": means,
        "speedup_unknown": speedup if isinstance(speedup, str) else None,
        "seconds_to_baseline": seconds_to_baseline,
    }


def _speedup_means(results: Results, speedup: Estimate) -> str:
    """Return how a speed-up was computed: a bound, a mean with interval, or one pair of runs."""
    ratio = f"baseline's {results.clock.seconds} / those of the best until as good"
    ratio = f"{results.unit}/s of the best / the baseline's" if results.by_rate else ratio
    if results.by_time:
        ratio = f"baseline's {results.clock.seconds} until the target / those of the best"
    over = f", geometric mean over {speedup.runs} seeds" if speedup.runs > 1 else ""
    if speedup.at_least:
        return (
            f"lower bound: {ratio}{over}; as good at the first evaluation already, there is no"
            " upper bound"
        )
    return f"{'mean with 95 % interval' if speedup.low else 'one pair of runs'}: {ratio}{over}"


def _noise(noise: Noise | None) -> NoiseResult | None:
    if noise is None:
        return None
    return NoiseResult(
        sd=noise.sd,
        relative=noise.ratios,
        runs=noise.runs,
        configurations=noise.configurations,
        rough=noise.is_rough,
    )


def _confirmed(confirmation: Comparison) -> dict[str, Any]:
    """Return the keys about the winner, or, without one, about the best finalist that ran."""
    winner, group = confirmation.winner, confirmation.leader
    keys = dict[str, Any]()
    for role, side in (("confirmed", group), ("confirmed_baseline", confirmation.baseline)):
        values = side.outcome.values if side is not None else []
        keys |= {
            f"{role}_value": mean(values),
            f"{role}_sd": sd(values),
            f"{role}_values": values,
            f"{role}_failures": len(side.outcome.failures) if side is not None else 0,
        }
    if group is not None:
        effect = effects(group.difference, confirmation.ratios)
        keys |= {f"confirmed_{name}": value for name, value in effect.items()}
        if (found := bias(confirmation, group)) is not None:
            keys |= {"value_when_chosen": found[0], "value_on_new_seeds": mean(found[1])}
    return keys | {
        "confirmed": winner is not None,
        "winner": winner.changed if winner is not None else None,
        "finalist": group.changed if group is not None and winner is None else None,
        "confirmed_metric": confirmation.label,
        "other_confirmations": [
            ConfirmationResult(
                name=other.folder.name,
                verdict=of_confirmation(other),
                winner=other.winner.changed if other.winner is not None else None,
            )
            for other in confirmation.others
        ],
        "confirmed_configurations": _configurations(confirmation),
        "confirm_runs_at_once": confirmation.at_once,
    }


def _configurations(compared: Comparison) -> list[ConfigurationResult]:
    """Return the configurations of a comparison over several seeds, the baseline first."""
    from_table = ("runs", "finished", "failures", "verdict", *SPEEDUP)
    return [
        ConfigurationResult(
            configuration=group.changed,
            value=row[f"{compared.metric}_mean"],
            sd=row[f"{compared.metric}_sd"],
            values=group.outcome.values,
            p=group.difference.p,
            p_holm=group.difference.p_holm,
            **effects(group.difference, compared.ratios),
            **{name: row[name] for name in (*from_table, "samples_per_s", "cost")},
            other_metrics={
                name: {"value": row[f"{name}_mean"], "sd": row[f"{name}_sd"]}
                for name in compared.results.judged
            },
        )
        for group, row in zip(compared.candidates, records(compared.table()), strict=True)
    ]
