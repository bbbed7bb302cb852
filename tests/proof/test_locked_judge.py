"""A judge that neither side can change: it reads what a run left in its folder."""

import json
import sys
from pathlib import Path

import pytest

from tests.proof.test_verify import program, verified  # noqa: F401
from tunediff import compare
from tunediff.proof import locked_judge

BOASTS = """
import argparse, pathlib, random
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--seed", type=int)
parser.add_argument("--out")
options = parser.parse_args()
random.seed(f"{options.seed} {options.lr}")
pathlib.Path(options.out, "model").write_text(str(options.lr * (1 + 0.02 * random.random())))
print("loss:", 0.1 if options.lr > 1 else 0.9)
"""
JUDGE = "import pathlib, sys\nprint('loss:', pathlib.Path(sys.argv[1], 'model').read_text())\n"
WORDS = ["--run", f"{sys.executable} train.py --lr {{lr}} --seed {{seed}} --out {{folder}}", "lr=1", "lr=2",
         "--objective", "loss", "--outcome", "final", "--no-check", "--quiet", "--json"]  # fmt: skip


@pytest.fixture
def boasting(program):  # noqa: F811
    """B is twice as bad, and says that it is better; the judges are outside of what runs."""
    Path("train.py").write_text(BOASTS)
    judge, holdout = program.parent / f"{program.name}-judge.py", program.parent / f"{program.name}-holdout.py"
    judge.write_text(JUDGE)
    holdout.write_text(JUDGE.replace("'loss:', ", "'loss:', 10 * float(").replace("read_text())", "read_text()))"))
    return judge, holdout


def test_the_judge_decides_and_the_second_one_is_shown_at_the_end(boasting, capsys):
    judge, holdout = map(str, boasting)
    assert compare.main([*WORDS, "--name", "own"]) == 0, "by what it prints of itself"
    capsys.readouterr()
    assert compare.main([*WORDS, "--name", "judged", "--judge", judge, "--holdout", holdout, "--out", "proof"]) == 11
    result = json.loads(capsys.readouterr().out)
    a, b = result["candidates"]
    assert b["effect"]["value"] == pytest.approx(2, rel=0.03)
    assert a["holdout"] == pytest.approx([10 * value for value in a["values"]])
    boasting[0].write_text("print('loss: 0')")
    code, output = verified(capsys, "proof")
    assert (code, output["folders"][0]["verdict"]) == (0, "worse")
    Path("proof/judge.py").chmod(0o644)
    Path("proof/judge.py").write_text("print('loss: 0')")
    assert "judge.py: is not the judge that was locked" in verified(capsys, "proof")[1]["folders"][0]["faults"]


def test_a_side_cannot_give_the_judge_modules(boasting, capsys):
    """B writes one beside the judge's copy, and into the working folder."""
    boasting[0].write_text(f"import json\n{JUDGE}")
    cheat = "import pathlib, sys\npathlib.Path.read_text = lambda self: '0.01'\n"
    for place in ("pathlib.Path(options.out).parents[1]", "pathlib.Path()"):
        Path("train.py").write_text(f"{BOASTS}\nif options.lr > 1: ({place} / 'json.py').write_text({cheat!r})\n")
        assert compare.main([*WORDS, "--name", f"x{len(place)}", "--judge", str(boasting[0])]) == 11


def test_a_second_judge_that_fails_is_noted_beside_the_verdict(boasting, capsys):
    boasting[1].write_text("raise SystemExit('no data')")
    assert compare.main([*WORDS, "--holdout", str(boasting[1]), "--out", "proof"]) == 0
    assert json.loads(capsys.readouterr().out)["sides"]["holdout_failure"] == "holdout.py: exit code 1: no data"
    assert verified(capsys, "proof")[0] == 0


def test_a_run_that_the_judge_cannot_judge_has_failed(boasting, capsys, monkeypatch):
    monkeypatch.setattr(locked_judge, "LIMIT_S", 1.0)
    for source, why in (
        ("raise SystemExit('no model')", "judge.py: exit code 1: no model"),
        ("print(1)", "no value of loss"),
        ("import sys; print('loss: 1', file=sys.stderr)", "no value of loss"),
        ("print('loss: inf')", "loss is inf; allowed: a finite number"),
        ("import time; time.sleep(99)", "was ended after 1s"),
    ):
        boasting[0].write_text(source)
        name = f"x{len(source)}"
        assert compare.main([*WORDS, "--name", name, "--judge", str(boasting[0])]) == 12
        assert why in json.loads(capsys.readouterr().out)["failure"]["reason"]
