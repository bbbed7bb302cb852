"""The page of public records says what its commands print."""

from pathlib import Path

from benchmarks import public_records

PAGE = (Path(__file__).parents[2] / "docs" / "results" / "2026-12-public-records.md").read_text()


def cells(text):
    return [cell.replace("−", "-").replace(" … ", " to ").strip() for cell in text.strip("| \n").split("|")]


def test_its_table_of_records_is_what_is_printed(capsys):
    public_records.track1()
    printed = [cells(line) for line in capsys.readouterr().out.splitlines()[2:]]
    shown = {cells(line)[0].replace(" ", "_"): cells(line) for line in PAGE.splitlines() if line.startswith("| 2")}
    for record, runs, ratio, _, loss, margin, target, prior, needed, _ in printed:
        found = shown.get(record) or shown[record.replace("-Mudd", "_Mudd")]
        assert found[1:] == [runs, ratio, loss, margin, target, prior, needed]


def test_its_other_figures_are_what_is_printed(capsys):
    public_records.rule()
    printed = capsys.readouterr().out
    for share in ("3.9%", "5.6%", "7.4%", "29%", "62%", "91%"):
        assert share in printed
        assert share.replace("%", " %") in PAGE
    public_records.track3()
    assert "0.00108" in capsys.readouterr().out


def test_the_official_order_of_algoperf_is_found():
    official = [
        "shampoo_submission", "schedule_free_adamw", "generalized_adam", "cyclic_lr", "nadamp", "baseline", "amos",
        "caspr_adaptive", "lawa_queue", "lawa_ema", "schedule_free_prodigy",
    ]  # fmt: skip
    scores = public_records.scores(public_records.study_times())
    assert sorted(scores, key=lambda name: -scores[name]) == official
    assert round(scores["shampoo_submission"], 3) == 0.778
