"""A result that a stranger can check: its folder, its verdict computed again, the same run on another machine."""

import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from scipy import special

from tests.json_schemas import validate
from tunediff import ConfigError, TunediffError, compare, run_comparison, verify
from tunediff.analysis.comparison import Comparison
from tunediff.api import sides
from tunediff.proof import frozen_code, ledger, locked_judge
from tunediff.proof.ledger import FILE, RECHECK, ZETA, Ledger, level_of

NOISY = """
import argparse, random
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1.0)
parser.add_argument("--seed", type=int)
options = parser.parse_args()
random.seed(f"{options.seed} {options.lr}")
print("loss:", options.lr * (1 + 0.1 * random.random()))
"""
RUN = f"{sys.executable} train.py --lr {{lr}} --seed {{seed}}"
WORDS = ("--objective", "loss", "--outcome", "final", "--no-check", "--quiet")


def repository(folder):
    """Make a git repository of a folder, with a training that takes no time."""
    (folder / "train.py").write_text(NOISY)
    (folder / ".gitignore").write_text("ray_results\n")
    commit(folder)
    return folder


def commit(folder):
    """Commit all that is in a folder, also where nothing has changed."""
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "--allow-empty", "-qm", "first"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A repository that is the working folder."""
    monkeypatch.chdir(repository(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A repository with a comparison that found B worse."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder := repository(tmp_path_factory.mktemp("program")))
        assert compare.main(["--run", RUN, "lr=1", "lr=2", *WORDS, "--name", "x", "--out", "proof"]) == 11
    return folder


@pytest.fixture
def proof(kept, tmp_path, monkeypatch):
    """The folder of that comparison in a copy of the repository, which is the working folder."""
    monkeypatch.chdir(shutil.copytree(kept, tmp_path, dirs_exist_ok=True))
    return tmp_path / "proof"


def verified(capsys, *folders):
    """Return (exit code, JSON) of `verify`."""
    capsys.readouterr()
    code = verify.main([*map(str, folders), "--json"])
    output = json.loads(capsys.readouterr().out)
    validate(output, "verify-output")
    return code, output


def test_the_verdict_follows_from_the_journals_alone(proof, capsys, tmp_path, monkeypatch):
    shutil.rmtree("ray_results")
    monkeypatch.chdir(tmp_path.parent)  # another machine has neither repository nor storage
    code, output = verified(capsys, proof)
    (folder,) = output["folders"]
    assert (code, folder["verified"], folder["verdict"], folder["faults"]) == (0, True, "worse", [])
    assert folder["candidates"][1]["effect"]["value"] == pytest.approx(2.0, rel=0.1)
    assert (proof / "A/source/train.py").read_text() == NOISY
    assert "**tunediff: worse.**" in (proof / "result.md").read_text()
    order = json.loads((proof / "proof.json").read_text())["order"]
    assert [words.split()[0] for words in order][:6] == ["A", "B", "B", "A", "A", "B"]
    assert verify.main([str(proof)]) == 0
    assert "verified: the journals give this result" in capsys.readouterr().out


def edit(file, *changes):
    """Replace texts in a file of the proof."""
    text = file.read_text()
    for old, new in changes:
        assert re.search(old, text), (file, old)
        text = re.sub(old, new, text)
    file.write_text(text)


def journal_copied(proof):
    shutil.copy(proof / "trials/t0000/journal.jsonl", proof / "trials/t0001/journal.jsonl")


def pair_removed(proof):
    last = sorted((proof / "trials").iterdir())[-2:]
    for folder in last:
        shutil.rmtree(folder)


def linked(proof):
    (proof / "B/source/train.py").unlink()
    (proof / "B/source/train.py").symlink_to(proof / "A/source/train.py")


TAMPERED = {
    "verdict": (lambda proof: edit(proof / "result.json", ('"worse"', '"better"')), "verdict: better in result.json, worse"),
    "name of a side": (lambda proof: edit(proof / "result.json", ('"name": "lr=2"', '"name": "lr=3"')), "name: lr=3 in result.json"),
    "comment's verdict": (lambda proof: edit(proof / "result.md", ("worse", "much better")), "does not begin with"),
    "comment's effect": (lambda proof: edit(proof / "result.md", (r"[\d.]+ \(", "1.002 (")), "does not follow"),
    "comment's pair": (lambda proof: edit(proof / "result.md", (r"\| 2 +\| [\d.]+", "| 2 | 9.9")), "pair 2 | 9.9"),
    "rules": (lambda proof: edit(proof / "experiment.yaml", ("level: 0.05", "level: 0.9")), "level: 0.9 is not allowed"),
    "journal of A as B's": (journal_copied, "by the journals"),
    "value": (lambda proof: edit(proof / "trials/t0001/journal.jsonl", (r'"loss": [\d.]+', '"loss": 0.5')), "by the journals"),
    "log": (lambda proof: edit(proof / "trials/t0001/output.log", (r"loss: [\d.]+", "loss: 0.5")), "output.log: has no 2."),
    "pair": (pair_removed, "by the journals"),
    "seed": (lambda proof: edit(proof / "trials/t0001/journal.jsonl", (r'"seed": \d+', '"seed": 7')), "its seed is 7, not "),
    "configuration": (lambda proof: edit(proof / "B/config.yaml", ("lr: 2", "lr: 7")), "lr was 2, not 7"),
    "code": (lambda proof: (proof / "B/source/train.py").write_text("print()"), "B/source/train.py: is not the file that ran"),
    "code removed": (lambda proof: (proof / "B/source/train.py").unlink(), "B/source/train.py: is not the file that ran"),
    "code added": (lambda proof: (proof / "B/source/random.py").write_text(""), "B/source/random.py: was not there when"),
    "command added": (lambda proof: (proof / "B/workload/json.py").write_text(""), "B/workload/json.py: was not there when"),
}  # fmt: skip
"""What was changed, and what `verify` says of it, also where proof.json was made new."""
PLAIN = {
    "log removed": (lambda proof: (proof / "trials/t0002/output.log").unlink(), "trials/t0002/output.log: is missing"),
    "file beside": (lambda proof: (proof / "B/notes.txt").write_text(""), "B/notes.txt: was not there"),
    "link": (linked, "B/source/train.py: has been changed"),
}
"""The same where it was not."""


def named_in_proof(proof):
    """Make the digests of proof.json new, which needs no secret."""
    content = json.loads((proof / "proof.json").read_text())
    files = [file for file in frozen_code.regular_files(proof) if file.name != "proof.json"]
    content["files"] = {file.relative_to(proof).as_posix(): frozen_code.sha256(file) for file in files}
    (proof / "proof.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("what", "anew"), [*((what, True) for what in TAMPERED), *((what, False) for what in ["value", "code", *PLAIN])]
)
def test_whatever_was_changed_is_named(proof, capsys, what, anew):
    change, fault = (TAMPERED | PLAIN)[what]
    change(proof)
    if anew:
        named_in_proof(proof)
    code, output = verified(capsys, proof)
    (folder,) = output["folders"]
    assert (code, folder["verified"]) == (1, False)
    assert any(fault in line for line in folder["faults"]), folder["faults"]
    with pytest.raises(TunediffError, match="is not as it was written"):
        run_comparison(reproduce=proof)


def test_seeds_follow_from_the_code(proof, capsys):
    """The same versions have the same seeds, also beside what `--out` has left; a change of either has others; the
    user may choose them."""
    program = proof.parent
    first = [run.seed for run in Comparison.read(program / "ray_results/x").rounds[0]]
    assert compare.main(["--run", RUN, "lr=1", "lr=2", *WORDS, "--name", "again"]) == 11
    assert [run.seed for run in Comparison.read(program / "ray_results/again").rounds[0]] == first
    Path("train.py").write_text(NOISY + "\n# a comment\n")
    assert compare.main(["--run", RUN, "lr=1", "lr=2", *WORDS, "--name", "edited"]) == 11
    assert [run.seed for run in Comparison.read(program / "ray_results/edited").rounds[0]] != first
    capsys.readouterr()
    chosen = ["--run", RUN, "lr=1", "lr=2", *WORDS, "--name", "chosen", "--seed", "500", "--json"]
    assert compare.main(chosen) == 11
    result = json.loads(capsys.readouterr().out)
    assert (result["sides"]["first_seed"], result["sides"]["seeds_drawn"]) == (500, False)


def test_another_machine_runs_it_again(proof, capsys, tmp_path_factory, monkeypatch):
    """In a folder that has neither the training nor its repository."""
    monkeypatch.chdir(elsewhere := tmp_path_factory.mktemp("elsewhere"))
    assert compare.main(["--reproduce", str(proof), "--name", "y", "--out", "mine", "--quiet"]) == 11
    again = Comparison.read(elsewhere / "ray_results/y")
    assert [run.seed for run in again.rounds[0]] == [run.seed for run in Comparison.read(proof).rounds[0]]
    assert compare.main(["--reproduce", str(proof), "--pairs", "5"]) == 2
    assert "--pairs: 5 is not allowed; allowed: what --reproduce finds in its folder" in capsys.readouterr().err
    code, output = verified(capsys, proof, elsewhere / "mine")
    first, second = output["folders"]
    assert (code, first["candidates"][0]["values"]) == (0, second["candidates"][0]["values"]), (
        "the program gives the same values everywhere"
    )


def test_a_revision_is_copied_after_its_worktree_has_gone(program):
    Path("train.py").write_text(NOISY.replace("options.lr *", "2 * options.lr *"))
    # The file that takes our output lies in the working copy, and is no code of it
    words = ["sh", "-c", 'exec "$@" > log.txt 2>&1', "sh", sys.executable, "-m", "tunediff.compare", "--run", RUN,
             "--at", "HEAD", "--at", ".", "lr=1", *WORDS[:-1], "--out", "proof"]  # fmt: skip
    assert subprocess.run(words).returncode == 11
    assert Path("proof/A/source/train.py").read_text() == NOISY
    assert "2 * options.lr" in Path("proof/B/source/train.py").read_text()
    assert verify.main(["proof"]) == 0


def test_an_edit_meanwhile_stops_it_until_it_is_undone(program, capsys):
    """The working copy is edited by the command itself, as a person would while it runs."""
    Path("train.py").write_text(NOISY + "\nopen('train.py', 'a').write('# more')\n")
    assert compare.main(["--run", RUN, "lr=1", "lr=2", *WORDS, "--name", "x"]) == 1
    assert "train.py was edited meanwhile; put it back" in capsys.readouterr().err
    assert [(run.attempts, run.finished) for run in Comparison.read(Path("ray_results/x")).runs] == [(1, False)]


REFERENCE = Path(__file__).parents[2] / "ray_results" / "reference" / "speedrun-digits"


@pytest.mark.parametrize(
    ("change", "verdict"), [("momentum", "better"), ("he", "better"), ("smoothing", "no_difference")]
)
def test_the_kept_speedrun_is_verified_in_any_clone(capsys, change, verdict):
    code, output = verified(capsys, REFERENCE / change)
    assert (code, output["folders"][0]["faults"]) == (0, [])
    assert output["folders"][0]["verdict"] == verdict


def test_a_file_that_is_too_large_is_named_with_its_digest(program, capsys):
    Path("data.bin").write_bytes(bytes(11 * 2**20))
    commit(program)
    assert compare.main(["--run", RUN, "lr=1", "lr=2", *WORDS, "--out", "proof"]) == 11
    large = json.loads(Path("proof/proof.json").read_text())["not_copied"]["A/source/data.bin"]
    assert (large["bytes"], large["sha256"]) == (11 * 2**20, frozen_code.sha256(Path("data.bin")))
    code, output = verified(capsys, "proof", "proof")
    assert (code, output["folders"][0]["notes"][0]) == (0, f"A/source/data.bin: {11 * 2**20} bytes, is not there")
    assert output["folders"][1]["notes"][-1] == "has the runs of proof: both are one result"


def test_all_that_may_run_is_in_the_digest_or_named(tmp_path):
    library, shared, program = (tmp_path / name for name in ("library", "shared", "program"))
    for folder in (library, shared, program / ".conf"):
        folder.mkdir(parents=True)
    (library / "model.py").write_text("X = 1")
    commit(library)
    (shared / "loss.py").write_text("Y = 1")
    (program / ".conf/base.yaml").write_text("lr: 1")
    (program / "shared").symlink_to("../shared")
    (program / "loss.py").symlink_to("../shared/loss.py")
    subprocess.run(["git", "init", "-q", str(program)], check=True)
    subprocess.run(
        [*"git -c protocol.file.allow=always -C".split(), str(program), "submodule", "-q", "add", str(library), "sub"],
        check=True,
    )
    repository(program)
    (program / ".gitignore").write_text("ray_results\nlocal.py\n")
    for name in ("local.py", ".env", "new.py"):
        (program / name).write_text("")
    counted, left = frozen_code.listed(program, program / "ray_results")
    assert counted == [".conf/base.yaml", ".gitignore", ".gitmodules", "loss.py", "new.py", "shared/loss.py", "sub/model.py",
                       "train.py"]  # fmt: skip
    assert sorted(left) == [".env", "local.py"]


def test_equal_sides_have_other_seeds_of_the_same_stream_and_are_verified(program, capsys):
    rules = ["--level", "0.001", "--pairs", "3"]
    code = compare.main(["--run", RUN, "lr=1", "--equal", *rules, *WORDS, "--out", "proof", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert (code, result["rule"]["equal_sides"]) == (10, True)
    a, b = result["candidates"]
    assert (a["digest"], b["configuration"], b["name"]) == (b["digest"], {}, "lr=1 on other seeds")
    assert set(a["values"]).isdisjoint(b["values"])
    assert verify.main(["proof"]) == 0


def test_one_run_that_is_repeated_shows_nothing_of_the_noise(program, capsys):
    """Without a seed six runs are two: any change would be better or worse by more than no noise."""
    run = f"{sys.executable} -c 'print(\"loss:\", {{lr}} / 3)'"
    code = compare.main(["--run", run, "lr=1", "lr=2", "--unseeded", *WORDS, "--name", "x", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert (code, result["verdict"], result["runs"], result["disturbed"]) == (10, "one_run_repeated", 4, None)
    assert (result["sides"]["unseeded"], result["sides"]["first_seed"]) == (True, None)
    assert compare.main(["--run", run, "lr=1", "lr=2", "--unseeded", "--seed", "3", *WORDS]) == 2
    assert compare.main(["--resume", "x"]) == 10
    assert "the noise of a training is not known" in capsys.readouterr().out


# -------------------- a chain of decisions spends from one error budget, and says when its head is to be compared again
def compared(capsys, *words):
    capsys.readouterr()
    code = compare.main(["--run", RUN, *words, *WORDS, "--ledger", "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_each_comparison_spends_and_each_gain_earns(program, capsys):
    code, first = compared(capsys, "lr=2", "lr=1", "--name", "a", "--pairs", "20")
    assert (code, first["sides"]["ledger"]["number"], first["sides"]["ledger"]["kept"]) == (0, 1, 1)
    assert first["sides"]["ledger"]["level"] == pytest.approx(level_of([], 0.05))
    assert first["rule"]["level"] == pytest.approx(2 * level_of([], 0.05)), "two-sided: «better» has half of it"
    code, second = compared(capsys, "lr=1", "lr=2", "--name", "b", "--one-sided")
    assert (code, second["sides"]["ledger"]["number"], second["sides"]["ledger"]["kept"]) == (10, 2, 1)
    assert second["rule"]["level"] == pytest.approx(level_of([True], 0.05))
    lines = [json.loads(line) for line in FILE.read_text().splitlines()]
    assert [(line["event"], line["id"] == lines[0]["id"]) for line in lines] == [
        ("begin", True), ("end", True), ("begin", False), ("end", False)
    ]  # fmt: skip
    assert compare.main(["--resume", "b", "--quiet"]) == 10
    again = ["--run", RUN, "lr=2", "lr=1", *WORDS, "--ledger", "--name", "c"]
    assert compare.main(again) == 2, "the same runs would earn once more"
    assert "a compares these versions on the same seeds: better; allowed: a changed" in capsys.readouterr().err
    FILE.write_text(FILE.read_text().replace('"verdict": "better"', '"verdict": "open"'))
    assert compare.main(again) == 2, "resumed later, it would earn once more"
    assert "a compares these versions on the same seeds: open; allowed: --resume a, or" in capsys.readouterr().err
    assert len(FILE.read_text().splitlines()) == 4, "what is shown again or refused spends nothing"
    assert not Path("ray_results", "c").exists()
    head = Ledger.read().head
    same = ("--run", RUN.replace("{lr}", "1"), "--at", "HEAD", "--at", ".", *WORDS)
    assert compare.main(same) == 2
    assert "A and B are identical but for what git ignores" in capsys.readouterr().err
    Path("train.py").write_text(NOISY + "\n")
    Path("imported.py").touch()
    sides = ("--run", RUN.replace("{lr}", "1"), "--at", head, "--at", ".")
    assert compare.main([*sides, *WORDS, "--ledger", "--confirm"]) == 2
    assert "--confirm: not committed:  M train.py, ?? imported.py; allowed: the head as B" in capsys.readouterr().err
    commit(program)
    assert compare.main([*sides, *WORDS, "--ledger", "--confirm"]) == 10
    assert compare.main([*again[:2], "lr=1", "lr=3", *WORDS, "--ledger", "--confirm"]) == 2
    assert f"A is lr=1; allowed: the version that was confirmed last, {head}" in capsys.readouterr().err


def test_the_head_is_due_after_some_kept_changes_until_it_is_confirmed(program):
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
    assert decide("no_difference", confirms=True) == {"recheck_due": False, "confirmed": first}
    head = Ledger.read().head
    assert decide("better", confirms=True) == {"recheck_due": False, "confirmed": head}


def test_a_damaged_ledger_is_refused(program):
    FILE.parent.mkdir()
    line = '{"event": "begin", "id": "1", "name": "x", "level": 0.1, "head": null, "confirms": false, "time": 1}\n'
    for text, why in (('{"event": "begin"}\n', "'id'"), (2 * line, "1 is there twice")):
        FILE.write_text(text)
        with pytest.raises(ConfigError, match=f"ledger.jsonl: is damaged: {why}"):
            Ledger.read()


def test_two_that_begin_at_once_are_two_with_levels_of_their_own(program, capsys, monkeypatch):
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


def test_a_ledger_whose_line_is_gone_ends_no_comparison(program, capsys, monkeypatch):
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


# ----------------------------------------- a judge that neither side can change: it reads what a run left in its folder
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
JUDGED = ["--run", f"{sys.executable} train.py --lr {{lr}} --seed {{seed}} --out {{folder}}", "lr=1", "lr=2",
         "--objective", "loss", "--outcome", "final", "--no-check", "--quiet", "--json"]  # fmt: skip


@pytest.fixture
def boasting(program):
    """B is twice as bad, and says that it is better; the judges are outside of what runs."""
    Path("train.py").write_text(BOASTS)
    judge, holdout = program.parent / f"{program.name}-judge.py", program.parent / f"{program.name}-holdout.py"
    judge.write_text(JUDGE)
    holdout.write_text(JUDGE.replace("'loss:', ", "'loss:', 10 * float(").replace("read_text())", "read_text()))"))
    return judge, holdout


def test_the_judge_decides_and_the_second_one_is_shown_at_the_end(boasting, capsys):
    judge, holdout = map(str, boasting)
    assert compare.main([*JUDGED, "--name", "own"]) == 0, "by what it prints of itself"
    capsys.readouterr()
    assert compare.main([*JUDGED, "--name", "judged", "--judge", judge, "--holdout", holdout, "--out", "proof"]) == 11
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
        assert compare.main([*JUDGED, "--name", f"x{len(place)}", "--judge", str(boasting[0])]) == 11


def test_a_second_judge_that_fails_is_noted_beside_the_verdict(boasting, capsys):
    boasting[1].write_text("raise SystemExit('no data')")
    assert compare.main([*JUDGED, "--holdout", str(boasting[1]), "--out", "proof"]) == 0
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
        assert compare.main([*JUDGED, "--name", name, "--judge", str(boasting[0])]) == 12
        assert why in json.loads(capsys.readouterr().out)["failure"]["reason"]


# ----------------- a revision runs its own files, also where an editable install or PYTHONPATH names the working copy's
TRAIN = "import mypkg, random, sys\nprint('loss:', mypkg.FACTOR * (1 + 0.01 * random.Random(sys.argv[1]).random()))\n"
MINE = """
from dataclasses import dataclass
import mypkg
from tunediff import Metric
@dataclass(frozen=True)
class Knobs:
    width: int = 8
OBJECTIVE = Metric("mse", "min")
def train(trial): pass
"""


@pytest.fixture
def layout(tmp_path, monkeypatch, at_tmp_path):
    """A repository whose package in `src/` is twice as good since its last commit, and on PYTHONPATH."""
    package = tmp_path / "src/mypkg/__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text("FACTOR = 2.0\n")
    Path("train.py").write_text(TRAIN)
    Path("mine.py").write_text(MINE)
    Path(".gitignore").write_text("ray_results\nsite\n__pycache__\n")
    commit(tmp_path)
    package.write_text("FACTOR = 1.0\n")
    commit(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{package.parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return tmp_path


def as_revisions(command):
    return compare.main(["--run", f"{command} {{seed}}", "--at", "HEAD~1", "--at", "HEAD", *WORDS, "--name", "x"])


def test_a_package_of_the_working_copy_ends_the_comparison_by_its_name(layout, capsys):
    assert as_revisions(f"{sys.executable} train.py") == 2
    assert "A: src/mypkg/__init__.py was loaded, which is not of the revision" in capsys.readouterr().err
    assert not any(Path("ray_results/x/trials/t0000").glob("loaded*"))
    assert "end" not in Path("ray_results/x/trials/t0000/journal.jsonl").read_text(), "--resume judges no such run"


def test_a_relative_path_runs_the_revision_beside_the_users_own_start(layout, monkeypatch):
    Path("site").mkdir()
    Path("site/sitecustomize.py").write_text("import sys\nsys.flag_of_mine = 1\n")
    start = "import sitecustomize, sys\nassert sys.flag_of_mine and 'tunediff' not in sitecustomize.__file__\n"
    Path("train.py").write_text(f"{start}assert not any('tunediff/command' in path for path in sys.path)\n{TRAIN}")
    commit(layout)
    Path("src/mypkg/__init__.py").write_text("FACTOR = 0.5\n")
    commit(layout)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["src", str(layout / "site"), os.environ["PYTHONPATH"]]))
    assert as_revisions(f"{sys.executable} train.py") == 0


def test_a_file_of_a_revision_is_refused_with_a_module_of_the_working_copy(layout, monkeypatch, tmp_path_factory):
    monkeypatch.syspath_prepend(layout / "src")
    with pytest.raises(ConfigError, match="src/mypkg/__init__.py was loaded, which is not of that revision"):
        sides.side_of(["mine.py@HEAD~1"], tmp_path_factory.mktemp("revision"))
    assert sides.side_of(["mine.py"], tmp_path_factory.mktemp("unused")).schema.workload.endswith("mine.py")
