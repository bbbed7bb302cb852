"""Collect and print the result of a search: `key: value` lines, tables and sentences, or JSON."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from tunediff import analysis, cli
from tunediff.analysis import Results, confirmation, statistics
from tunediff.analysis.comparison import speedup_values
from tunediff.analysis.confirmation import longer_budgets
from tunediff.analysis.evidence import Evidence
from tunediff.analysis.noise import unmoved
from tunediff.analysis.pareto import pareto_table
from tunediff.analysis.statistics import Estimate
from tunediff.core import text
from tunediff.core import trial_record as record
from tunediff.core.files import study_url
from tunediff.core.trial_record import TrialRecord
from tunediff.report import outputs, page, result_json, study_table, verdicts, words
from tunediff.report.headline import headline
from tunediff.report.words import columns, has_value, plain_table
from tunediff.tuning import sessions


def as_json(evidence: Evidence) -> dict[str, Any]:
    """Return the result of a search as `--json` prints it."""
    confirmed, space = evidence.confirmation, evidence.results.space
    longer = longer_budgets(confirmed.compared.results, analysis.read) if confirmed is not None else []
    studied = study_table.table(evidence.results) if space.study is not None else None
    return cli.versioned(result_json.search(evidence, _block(evidence), studied, longer))


def _block(evidence: Evidence) -> dict[str, Any]:
    """Return the result of a search and of its confirming runs as values by name."""
    folder, confirmed = evidence.results.folder, evidence.confirmation
    confirming = [analysis.read(runs) for runs in sessions.confirming_folders(folder)]
    block = values(evidence, sessions.all_spent_s(folder), confirming)
    if confirmed is not None:
        block |= verdicts.block(confirmed) | {"confirmation": str(folder / outputs.CONFIRMATION)}
    return block


def lines(evidence: Evidence) -> list[str]:
    """Return the result of a search as lines of text: values first, then tables, each with its conclusions."""
    results, compared, confirmed = evidence.results, evidence.compared, evidence.confirmation
    studied = study_table.table(results) if results.space.study is not None else None
    front = pareto_table(results) if results.space.cost is not None else None
    block = _block(evidence)
    first = headline(evidence) if confirmed is None else ""  # else it stands below the table of the confirming runs
    remarks = [
        first,
        verdicts.disturbed_words(evidence),
        verdicts.unmoved_words(results),
        verdicts.caution_words(evidence),
    ]
    output = ["", text.block(block), *(f"\n{remark}" for remark in remarks if remark)]
    if compared is not None:
        table = plain_table(verdicts.comparison_table(compared, compact=True), columns())
        output += ["", table, "", *verdicts.conclusions(compared)]
    if front is not None:
        rows = [[text.number(value) if has_value(value) else "" for value in row] for row in front.to_numpy().tolist()]
        pareto = plain_table([list(map(str, front.columns)), *rows], columns(), words=-1)
        output.append(f"\nPareto front, from the best value to the lowest cost:\n{pareto}")
    if confirmed is not None:
        output += [
            "",
            plain_table(verdicts.confirmation_table(confirmed), columns()),
            "",
            *verdicts.sentences(confirmed),
        ]
        for comparison in longer_budgets(confirmed.compared.results, analysis.read):
            table = plain_table(verdicts.comparison_table(comparison, compact=True), columns())
            budget = words.duration(comparison.results.space.budget.per_trial_s)
            output += ["", f"With {budget}:", table, "", *verdicts.conclusions(comparison)]
    if studied is not None:
        output += ["", *filter(None, [studied.study.title]), studied.text(columns())]
    return output


def values(evidence: Evidence, wall_s: float, confirming: Sequence[Results] = ()) -> dict[str, Any]:
    """Return the result of a search as values by name, for printing; `result_json.search` is the form for `--json`.

    wall_s: seconds of all its sessions. confirming: results of its confirming runs; all seconds include theirs.
    """
    results, best = evidence.results, evidence.best
    statuses = collections.Counter(trial.status or "unfinished" for trial in results.trials)
    block: dict[str, Any] = {
        "search": results.folder.name,
        "trials": len(results.trials),
        **{status: statuses[status] for status in record.COUNTED if status in statuses},
    }
    if best is not None:
        block |= _best(evidence) | _speedup(evidence, best) | verdicts.noise_block(evidence)
    if evidence.confirmation is None and (why := confirmation.nothing_to_confirm(results)):
        block["nothing_to_confirm"] = why
    if count := sum(map(analysis.disturbed, results.trials)):
        block["disturbed_trials"] = count
    if count := unmoved(results):
        block["unmoved_trials"] = count
    return block | _costs(results, wall_s, confirming) | _files(evidence)


def _costs(results: Results, wall_s: float, confirming: Sequence[Results]) -> dict[str, Any]:
    """Return the seconds of a search by part, those of its confirming runs included, and what else it used."""
    parts = statistics.totals([runs.seconds() for runs in (results, *confirming)])
    again = statistics.totals([runs.seconds() for runs in confirming])
    training = parts["train"] + parts["data_wait"]
    return {
        "wall_s": wall_s,
        "training_s": training,
        **statistics.totals([runs.used() for runs in (results, *confirming)]),
        **{f"{part}_s": parts[part] for part in ("data_wait", "compile", "evaluation", "checkpoint", "setup")},
        "overhead_s": max(0.0, wall_s - sum(parts.values())),
        "training_share": training / wall_s if wall_s else 0.0,
        "confirm_wall_s": sum(sessions.spent_s(runs.folder) for runs in confirming),
        "confirm_training_s": again.get("train", 0.0) + again.get("data_wait", 0.0),
    }


def _files(evidence: Evidence) -> dict[str, str]:
    """Return the files that a search has written, and the commands that continue from here."""
    folder, space, best = evidence.results.folder, evidence.results.space, evidence.best
    files = (
        ("table", "trials.csv", True),
        ("curves", "curves.png", True),
        ("comparison", "comparison.png", evidence.compared is not None),
        ("pareto", "pareto.csv", space.cost is not None),
        ("study_table", "study.md", space.study is not None),
        ("study_figure", "study.png", space.study is not None and space.study.has_figure),
    )
    block = {"results": str(folder)} | {key: str(folder / name) for key, name, exists in files if exists}
    block["study"] = study_url(folder / "study.db")
    if best is not None:
        if (shown := folder / "trials" / best.name / "samples.png").exists():
            block["samples"] = str(shown)
        block["export"] = text.command("export", folder.name, storage=folder.parent)
    written, command = folder / page.PAGE, text.command("report", folder.name, storage=folder.parent)
    return block | {"report": str(written) if written.is_file() else command}


def _best(evidence: Evidence) -> dict[str, Any]:
    """Return the best configuration and the baseline, with the means over their runs."""
    values, label = result_json.best_and_baseline(evidence), evidence.results.label
    block = {"best_trial": values["best_trial"], "best_configuration": text.knobs(values["best_configuration"])}
    if evidence.compared is not None:
        block["best_verdict"] = values["best_verdict"]
    block |= {f"{role}_{label}": values[f"{role}_value"] for role in ("best", "baseline")}
    if evidence.compared is not None:
        block["means_over"] = f"{len(values['best_values'])} seeds"
    else:
        runs = {role: len(values[f"{role}_values"]) for role in ("best", "baseline")}
        block |= {f"{role}_is": f"mean of its {many} runs" for role, many in runs.items() if many > 1}
    return block


def _speedup(evidence: Evidence, best: TrialRecord) -> dict[str, Any]:
    """Return the speed-up of the best trial to the baseline's result, or why it is not determined."""
    speedup = evidence.speedup(best)
    if isinstance(speedup, str):
        return {"speedup": words.speedup(speedup)}
    ends: dict[str, Any] = {name: value for name, value in speedup_values(speedup).items() if value is not None}
    if speedup.at_least:
        ends = {"speedup": words.estimated(speedup)}
    seconds = {} if speedup.low else {"seconds_to_baseline": evidence.seconds_to_baseline(best)}
    seconds = {name: value for name, value in seconds.items() if value is not None}
    return {**ends, **seconds, "speedup_means": speedup_means(evidence.results, speedup)}


def speedup_means(results: Results, speedup: Estimate) -> str:
    """Return how a speed-up was computed: as a lower bound, a mean with interval, or from one pair of runs."""
    ratio = f"baseline's {results.clock.seconds} / those of the best until as good"
    ratio = f"{results.unit}/s of the best / the baseline's" if results.by_rate else ratio
    over = f", geometric mean over {speedup.runs} seeds" if speedup.runs > 1 else ""
    if speedup.at_least:
        return f"lower bound: {ratio}{over}; as good at the first evaluation already, there is no upper bound"
    return f"{'mean with 95 % interval' if speedup.low else 'one pair of runs'}: {ratio}{over}"
