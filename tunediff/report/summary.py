"""The result of a search as values by name: what its last lines and `--json` say."""

from __future__ import annotations

import collections
import json
from typing import Any

import pandas as pd

from tunediff import cli, record, results
from tunediff.record import TrialRecord
from tunediff.report import outputs, study_table, verdicts
from tunediff.report.sections import hold as section
from tunediff.report.words import plain_table
from tunediff.results import Results, comparison, hold
from tunediff.results.comparison import Comparison
from tunediff.results.confirmation import Confirmation
from tunediff.tuning import experiment


def conclude(found: Results, confirmed: Confirmation | None, as_json: bool) -> None:
    """Print the result."""
    compared = comparison.compare(found) if found.space.seeds > 1 else None
    studied = study_table.table(found) if found.space.study is not None else None
    front = found.pareto_table() if found.space.cost is not None else None
    block = values(found, experiment.spent_s(found.folder), compared)
    if confirmed is not None:
        block |= verdicts.block(confirmed) | {"confirmation": str(outputs.confirmation(confirmed)["confirm.md"])}
    if as_json:
        if compared is not None:
            block |= {"configurations": records(compared.table()), "conclusions": verdicts.conclusions(compared)}
        if studied is not None:
            block["study_rows"] = records(studied.frame())
        if confirmed is not None and (longer := hold.read(found, confirmed.compared.found, results.read)):
            block["longer_budgets"] = [records(held.table()) for held in longer]
        if front is not None:
            block["pareto_rows"] = records(front)
        print(json.dumps(block, indent=2))
        return
    said = ["", cli.block(block)]
    if compared is not None:
        table = plain_table(verdicts.comparison_table(compared, compact=True))
        said += ["", table, "", *verdicts.conclusions(compared)]
    if front is not None:
        words = front.to_string(index=False, float_format=cli.number)
        said.append(f"\nPareto front, from the best value to the lowest cost:\n{words}")
    if confirmed is not None:
        said += ["", plain_table(verdicts.confirmation_table(confirmed)), "", *verdicts.sentences(confirmed)]
        for held in hold.read(found, confirmed.compared.found, results.read):
            said += ["", plain_table(section.hold_table(held)), "", *section.sentences(held)]
    if studied is not None:
        said += ["", *filter(None, [studied.study.title]), studied.text()]
    print("\n".join(said))


def values(found: Results, wall_s: float, compared: Comparison | None = None) -> dict[str, Any]:
    """The result of a search, for people (`key: value`) and for `--json`; `compared`: of one with several seeds."""
    parts, best, folder, study = found.seconds(), found.best, found.folder, found.space.study
    statuses = collections.Counter(trial.status or "unfinished" for trial in found.trials)
    block: dict[str, Any] = {
        "search": folder.name,
        "trials": len(found.trials),
        **{status: statuses[status] for status in (*record.STATUSES, "unfinished") if status in statuses},
    }
    if best is not None:
        block |= _best(found, best) if compared is None else _best_of_seeds(compared, best)
        if "seconds_to_baseline" in block:
            block["speedup_means"] = (
                "baseline's training seconds / those of the best until equal (linear between points)"
            )
        block |= verdicts.noise_block(found, verdicts.noise_of(found)) if compared is None else {}
    training = parts["train"] + parts["data_wait"]
    block |= {
        "wall_s": wall_s,
        "training_s": training,
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
    if why := found.no_baseline(best):
        block["speedup"] = f"not determined: {why}"
    else:
        block["speedup"] = found.speedup(best)
        block |= {} if found.by_rate else {"seconds_to_baseline": found.seconds_to_baseline(best)}
    return block


def _best_of_seeds(compared: Comparison, best: TrialRecord) -> dict[str, Any]:
    """The configuration with the best mean over the seeds, beside the baseline; `best` is its best run."""
    rows, mean, label = records(compared.table()), f"{compared.metric}_mean", compared.found.label
    row = rows[compared.groups.index(compared.of(best))]
    base = rows[0] if compared.baseline is not None else {}
    block = {"best_trial": best.name, "best_configuration": row["configuration"], "best_verdict": row["verdict"]}
    block |= {f"best_{label}": row[mean], f"baseline_{label}": base.get(mean)}
    block["means_over"] = f"{row['finished']} seeds"
    if compared.baseline is None or not compared.baseline.done:
        return block | {"speedup": "not determined: no run of the baseline ended ok"}
    block["speedup"] = row["speedup"]
    return block if compared.found.by_rate else block | {"seconds_to_baseline": row["seconds_to_baseline"]}


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows in JSON types; what is missing is null."""
    rows: list[dict[str, Any]] = json.loads(table.to_json(orient="records"))
    return rows
