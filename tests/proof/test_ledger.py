"""A chain of decisions spends from one error budget, and says when its head is to be compared again."""

import json
import subprocess
import uuid
from pathlib import Path

import pytest
from scipy import special

from tests.proof.test_verify import RUN, WORDS, program  # noqa: F401
from tunediff import ConfigError, compare
from tunediff.proof import ledger
from tunediff.proof.ledger import FILE, RECHECK, ZETA, Ledger, level_of


def compared(capsys, *words):
    capsys.readouterr()
    code = compare.main(["--run", RUN, *words, *WORDS, "--ledger", "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_each_comparison_spends_and_each_gain_earns(program, capsys):  # noqa: F811
    code, first = compared(capsys, "lr=2", "lr=1", "--name", "a", "--pairs", "20")
    assert (code, first["sides"]["ledger"]["number"], first["sides"]["ledger"]["kept"]) == (0, 1, 1)
    assert first["sides"]["ledger"]["level"] == pytest.approx(level_of([], 0.05))
    assert first["rule"]["level"] == pytest.approx(2 * level_of([], 0.05)), "two-sided: «better» has half of it"
    code, second = compared(capsys, "lr=1", "lr=2", "--name", "b", "--one-sided")
    assert (code, second["sides"]["ledger"]["number"], second["sides"]["ledger"]["kept"]) == (10, 2, 1)
    assert second["rule"]["level"] == pytest.approx(level_of([True], 0.05))
    lines = [json.loads(line) for line in FILE.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["begin", "end", "begin", "end"]
    assert lines[0]["id"] == lines[1]["id"] != lines[2]["id"] == lines[3]["id"]
    assert compare.main(["--resume", "b", "--quiet"]) == 10
    assert len(FILE.read_text().splitlines()) == 4, "a result that is shown again spends nothing"
    again = ["--run", RUN, "lr=2", "lr=1", *WORDS, "--ledger", "--name", "c"]
    assert compare.main(again) == 2, "the same runs would earn once more"
    assert "a has compared these versions on the same seeds: better" in capsys.readouterr().err
    assert len(FILE.read_text().splitlines()) == 4
    assert not Path("ray_results", "c").exists()
    head = Ledger.read().head
    sides = ("--run", RUN.replace("{lr}", "1"), "--at", head, "--at", ".")
    assert compare.main([*sides, *WORDS, "--ledger", "--confirm"]) == 10
    assert compare.main([*again[:2], "lr=1", "lr=3", *WORDS, "--ledger", "--confirm"]) == 2
    assert f"A is lr=1; allowed: the version that was confirmed last, {head}" in capsys.readouterr().err


def test_the_head_is_due_after_some_kept_changes_until_it_is_confirmed(program):  # noqa: F811
    def decide(verdict, confirms=False):
        FILE.parent.mkdir(exist_ok=True)
        found, key = Ledger.read(), uuid.uuid4().hex
        found.append("begin", id=key, name="x", level=0.01, head=found.head, confirms=confirms)
        found.append("end", id=key, verdict=verdict)
        Path("train.py").write_text(Path("train.py").read_text() + "\n")
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "x"], check=True)

        return {name: Ledger.read().state(key, 0.05)[name] for name in ("recheck_due", "confirmed")}

    first = Ledger.read().head
    for number in range(RECHECK):
        assert decide("better") == {"recheck_due": number + 1 == RECHECK, "confirmed": first}
        decide("worse")
    assert decide("no_difference", confirms=True) == {"recheck_due": True, "confirmed": first}
    head = Ledger.read().head
    assert decide("better", confirms=True) == {"recheck_due": False, "confirmed": head}


def test_a_damaged_ledger_is_refused(program):  # noqa: F811
    FILE.parent.mkdir()
    line = '{"event": "begin", "id": "1", "name": "x", "level": 0.1, "head": null, "confirms": false, "time": 1}\n'
    for text, why in (('{"event": "begin"}\n', "'id'"), (2 * line, "1 is there twice")):
        FILE.write_text(text)
        with pytest.raises(ConfigError, match=f"ledger.jsonl: is damaged: {why}"):
            Ledger.read()


def test_two_that_begin_at_once_are_two_with_levels_of_their_own(program, capsys, monkeypatch):  # noqa: F811
    """The second one begins after the first has read the ledger and before it is in it."""
    begin, words = ledger.begin, ["lr=2", "lr=1"]

    def other_first(folder, options):
        monkeypatch.setattr(ledger, "begin", begin)
        assert compare.main(["--run", RUN, "lr=1", "lr=3", *WORDS, "--ledger", "--name", "other"]) in (10, 11)
        begin(folder, options)

    monkeypatch.setattr(ledger, "begin", other_first)
    _, second = compared(capsys, *words, "--name", "x")
    assert (second["sides"]["ledger"]["number"], len(Ledger.read().entries)) == (2, 2)
    assert second["rule"]["level"] == pytest.approx(2 * level_of([False], 0.05))


def test_a_ledger_whose_line_is_gone_ends_no_comparison(program, capsys, monkeypatch):  # noqa: F811
    """As after a checkout of another branch."""
    end = ledger.end
    monkeypatch.setattr(ledger, "end", lambda folder: (FILE.unlink(), end(folder)))
    code, result = compared(capsys, "lr=2", "lr=1", "--name", "x")
    assert (code, result["verdict"]) == (0, "better")


# ------------------------------------------------------------------------------------------------------ the levels
def test_levels_are_those_of_the_formula():
    assert pytest.approx(special.zeta(1.6)) == ZETA
    first = 0.5 * 0.05 / special.zeta(1.6)
    assert level_of([], 0.05) == pytest.approx(first)
    assert level_of([False], 0.05) == pytest.approx(first * 2**-1.6)
    assert level_of([True], 0.05) == pytest.approx(first * 2**-1.6 + 0.025 / special.zeta(1.6))
    third = first * 3**-1.6 + (0.025 * 2**-1.6 + 0.05) / special.zeta(1.6)
    assert level_of([True, True], 0.05) == pytest.approx(third)
