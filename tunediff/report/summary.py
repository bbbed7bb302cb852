"""The result of a search as values by name: what its last lines and `--json` say."""

from __future__ import annotations

import collections
import json
from typing import Any

import pandas as pd

from tunediff import cli, record, results
from tunediff.record import TrialRecord
from tunediff.report import outputs, study_table, verdicts, words
from tunediff.report.words import columns, is_known, plain_table
from tunediff.results import Results
from tunediff.results.comparison import Comparison
from tunediff.results.confirmation import Confirmation, longer_budgets
from tunediff.results.evidence import Evidence
from tunediff.tuning import experiment


def conclude(found: Results, confirmed: Confirmation | None, as_json: bool) -> None:
    """Print the result."""
    known = Evidence(found, confirmed)
    compared = known.compared
    studied = study_table.table(found) if found.space.study is not None else None
    front = found.pareto_table() if found.space.cost is not None else None
    block = values(known, experiment.spent_s(found.folder))
    if confirmed is not None:
        block |= verdicts.block(confirmed) | {"confirmation": str(outputs.confirmation(confirmed)["confirm.md"])}
    if as_json:
        if compared is not None:
            block |= {"configurations": records(compared.table()), "conclusions": verdicts.conclusions(compared)}
        if studied is not None:
            block["study_rows"] = records(studied.frame())
        if confirmed is not None and (longer := longer_budgets(confirmed.compared.found, results.read)):
            block["longer_budgets"] = [
                records(one.table().assign(budget_s=one.found.space.budget.per_trial_s)) for one in longer
            ]
        if front is not None:
            block["pareto_rows"] = records(front)
        print(json.dumps(block, indent=2))
        return
    said = ["", cli.block(block)]
    if compared is not None:
        table = plain_table(verdicts.comparison_table(compared, compact=True), columns())
        said += ["", table, "", *verdicts.conclusions(compared)]
    if front is not None:
        rows = [[cli.number(value) if is_known(value) else "" for value in row] for row in front.to_numpy().tolist()]
        text = plain_table([list(map(str, front.columns)), *rows], columns(), words=-1)
        said.append(f"\nPareto front, from the best value to the lowest cost:\n{text}")
    if confirmed is not None:
        said += ["", plain_table(verdicts.confirmation_table(confirmed), columns()), "", *verdicts.sentences(confirmed)]
        for one in longer_budgets(confirmed.compared.found, results.read):
            table = plain_table(verdicts.comparison_table(one, compact=True), columns())
            budget = words.duration(one.found.space.budget.per_trial_s)
            said += ["", f"With {budget}:", table, "", *verdicts.conclusions(one)]
    if studied is not None:
        said += ["", *filter(None, [studied.study.title]), studied.text(columns())]
    print("\n".join(said))


def values(known: Evidence, wall_s: float) -> dict[str, Any]:
    """The result of a search, for people (`key: value`) and for `--json`."""
    found, best, compared = known.found, known.best, known.compared
    parts, folder, study = found.seconds(), found.folder, found.space.study
    statuses = collections.Counter(trial.status or "unfinished" for trial in found.trials)
    block: dict[str, Any] = {
        "search": folder.name,
        "trials": len(found.trials),
        **{status: statuses[status] for status in (*record.STATUSES, "unfinished") if status in statuses},
    }
    if best is not None:
        block |= _best(found, best) if compared is None else _best_of_seeds(compared, best)
        block |= _speedup(known, best) | verdicts.noise_block(known)
    training = parts["train"] + parts["data_wait"]
    block |= {
        "wall_s": wall_s,
        "training_s": training,
        **{name: value for name, value in found.used().items() if value is not None},
        **{f"{part}_s": parts[part] for part in ("data_wait", "compile", "evaluation", "checkpoint", "setup")},
        "overhead_s": max(0.0, wall_s - sum(parts.values())),
        "training_share": training / wall_s if wall_s else 0.0,
        "results": str(folder),
    }
    files = (
        ("table", "trials.csv", True),
        ("curves", "curves.png", True),
        ("comparison", "comparison.png", compared is not None),
        ("pareto", "pareto.csv", found.space.cost is not None),
        ("study_table", "study.md", study is not None),
        ("study_figure", "study.png", study is not None and study.has_figure),
    )
    block |= {what: str(folder / name) for what, name, there in files if there}
    block["study"] = experiment.study_url(folder / "study.db")
    if best is not None:
        if (shown := folder / "trials" / best.name / "samples.png").exists():
            block["samples"] = str(shown)
        block["export"] = cli.command("export", folder.name, storage=folder.parent)
    return block | {"report": cli.command("report", folder.name, storage=folder.parent)}


def _best(found: Results, best: TrialRecord) -> dict[str, Any]:
    """The best trial of a search with one seed, beside the baseline."""
    base, label = found.baseline, found.label
    of_base = base.value(found.metric) if base is not None else None
    block: dict[str, Any] = {"best_trial": best.name, "best_configuration": cli.knobs(found.changed(best))}
    block |= {f"best_{label}": best.value(found.metric), f"baseline_{label}": of_base}
    return block


def _speedup(known: Evidence, best: TrialRecord) -> dict[str, Any]:
    """How many times sooner the best is as good as the baseline, or why that is not determined."""
    told = known.speedup(best)
    if isinstance(told, str):
        return {"speedup": words.speedup(told)}
    ends = {"speedup": told.mean} | ({"speedup_low": told.low, "speedup_high": told.high} if told.low else {})
    if known.found.by_rate:
        return ends
    seconds = {} if told.low else {"seconds_to_baseline": known.seconds_to_baseline(best)}
    over = f", geometric mean over {told.runs} seeds" if told.low else ""
    over += "; at least: it was as good at its first evaluation" if told.at_least else ""
    means = f"baseline's {known.found.clock.seconds} / those of the best until as good{over}"
    return {**ends, **seconds, "speedup_means": means}


def _best_of_seeds(compared: Comparison, best: TrialRecord) -> dict[str, Any]:
    """The best configuration over the seeds, beside the baseline; `best` is one of its runs."""
    rows, mean, label = records(compared.table()), f"{compared.metric}_mean", compared.found.label
    row = rows[compared.groups.index(compared.of(best))]
    base = rows[0] if compared.baseline is not None else {}
    block = {"best_trial": best.name, "best_configuration": row["configuration"], "best_verdict": row["verdict"]}
    block |= {f"best_{label}": row[mean], f"baseline_{label}": base.get(mean)}
    return block | {"means_over": f"{row['finished']} seeds"}


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows in JSON types; what is missing is null."""
    rows: list[dict[str, Any]] = json.loads(table.to_json(orient="records"))
    return rows
