"""A chain of decisions spends from one error budget, and says when its head is to be compared again."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.judge.test_verify import RUN, WORDS, program  # noqa: F401
from tunediff import ConfigError, compare
from tunediff.analysis.online_fdr import level_of
from tunediff.judge.ledger import FILE, RECHECK, Ledger


def compared(capsys, *words):
    capsys.readouterr()
    code = compare.main(["--run", RUN, *words, *WORDS, "--ledger", "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_each_comparison_spends_and_each_gain_earns(program, capsys):  # noqa: F811
    code, first = compared(capsys, "lr=2", "lr=1", "--name", "a", "--pairs", "20")
    assert (code, first["ledger"]["number"], first["ledger"]["kept"]) == (0, 1, 1)
    assert first["ledger"]["level"] == pytest.approx(level_of([], 0.05))
    assert first["level"] == pytest.approx(2 * level_of([], 0.05)), "two-sided: «better» has half of it"
    code, second = compared(capsys, "lr=1", "lr=2", "--name", "b", "--one-sided")
    assert (code, second["ledger"]["number"], second["ledger"]["kept"]) == (10, 2, 1)
    assert second["level"] == pytest.approx(level_of([True], 0.05))
    lines = [json.loads(line) for line in FILE.read_text().splitlines()]
    assert [(line["event"], line["number"]) for line in lines] == [("begin", 1), ("end", 1), ("begin", 2), ("end", 2)]
    assert compare.main(["--resume", "b", "--quiet"]) == 10
    assert len(FILE.read_text().splitlines()) == 4, "a result that is shown again spends nothing"
    assert compare.main(["--run", RUN, "lr=1", "lr=2", *WORDS, "--confirm"]) == 2
    assert "--confirm: True is not allowed; allowed: with --ledger" in capsys.readouterr().err


def test_the_head_is_due_after_some_kept_changes_until_it_is_confirmed(program):  # noqa: F811
    def decide(verdict, confirms=False):
        ledger = Ledger.read()
        Ledger.read().end(ledger.begin("x", 0.01, confirms), verdict)
        Path("train.py").write_text(Path("train.py").read_text() + "\n")
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "x"], check=True)

    first = Ledger.read().head
    for _ in range(RECHECK):
        assert not Ledger.read().is_due
        decide("better")
        decide("worse")
    assert Ledger.read().is_due
    assert Ledger.read().confirmed == first
    decide("no significant difference", confirms=True)
    assert Ledger.read().is_due
    head = Ledger.read().head
    decide("better", confirms=True)
    assert (Ledger.read().is_due, Ledger.read().confirmed) == (False, head)


def test_a_damaged_ledger_is_refused(program):  # noqa: F811
    FILE.parent.mkdir()
    FILE.write_text('{"event": "begin"}\n')
    with pytest.raises(ConfigError, match="ledger.jsonl: is damaged: 'number'"):
        Ledger.read()
