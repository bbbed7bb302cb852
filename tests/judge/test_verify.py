"""A result that a stranger can check: its folder, its verdict computed again, the same run on another machine."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.json_schemas import validate
from tunediff import TunediffError, compare, run_comparison, verify
from tunediff.analysis import pairs
from tunediff.core import machine

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
    assert folder["ratio"] == pytest.approx(2.0, rel=0.1)
    assert (proof / "A/source/train.py").read_text() == NOISY
    assert "**tunediff: worse.**" in (proof / "result.md").read_text()
    order = json.loads((proof / "proof.json").read_text())["order"]
    assert [words.split()[0] for words in order][:6] == ["A", "B", "B", "A", "A", "B"]
    assert verify.main([str(proof)]) == 0
    assert "verified: the journals give this result" in capsys.readouterr().out


def _seed_of_b_changed(proof):
    lines = (proof / "trials/t0001/journal.jsonl").read_text()
    seed = json.loads(lines.splitlines()[0])["seed"]
    (proof / "trials/t0001/journal.jsonl").write_text(lines.replace(str(seed), "7"))


def _better_value_in_a_journal(proof):
    shutil.copy(proof / "trials/t0000/journal.jsonl", proof / "trials/t0001/journal.jsonl")


def _verdict_changed(proof):
    result = proof / "result.json"
    result.write_text(result.read_text().replace('"worse"', '"better"'))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (_verdict_changed, "verdict: better in result.json, worse by the journals"),
        (_better_value_in_a_journal, "by the journals"),
        (_seed_of_b_changed, "t0001: its seed is 7, not "),
        (lambda proof: (proof / "B/source/train.py").write_text("print()"), "B/source/train.py: is not the file that ran"),
        (lambda proof: (proof / "trials/t0002/output.log").unlink(), "trials/t0002/output.log: is missing"),
    ],
)  # fmt: skip
def test_whatever_was_changed_is_named(proof, capsys, change, fault):
    change(proof)
    code, output = verified(capsys, proof)
    (folder,) = output["folders"]
    assert (code, folder["verified"]) == (1, False)
    assert any(fault in line for line in folder["faults"]), folder["faults"]
    with pytest.raises(TunediffError, match="is not as it was written"):
        run_comparison(reproduce=proof)


def test_seeds_follow_from_the_code(proof, capsys):
    """The same versions have the same seeds, also beside what `--out` has left and without git; a change of either has
    others; the user may choose them."""
    program = proof.parent
    first = [run.seed for run in pairs.read(program / "ray_results/x").runs[0]]
    for name in ("again", "without-git"):
        assert compare.main(["--run", RUN, "lr=1", "lr=2", *WORDS, "--name", name]) == 11
        assert [run.seed for run in pairs.read(program / "ray_results" / name).runs[0]] == first
        shutil.rmtree(program / ".git", ignore_errors=True)
    Path("train.py").write_text(NOISY + "\n# a comment\n")
    assert compare.main(["--run", RUN, "lr=1", "lr=2", *WORDS, "--name", "edited"]) == 11
    assert [run.seed for run in pairs.read(program / "ray_results/edited").runs[0]] != first
    capsys.readouterr()
    chosen = ["--run", RUN, "lr=1", "lr=2", *WORDS, "--name", "chosen", "--seed", "500", "--json"]
    assert compare.main(chosen) == 11
    result = json.loads(capsys.readouterr().out)
    assert (result["first_seed"], result["seeds_drawn"]) == (500, False)


def test_a_seed_without_effect_is_named(program, capsys):
    Path("train.py").write_text(NOISY.replace("{options.seed} ", "7 "))
    assert compare.main(["--run", RUN, "lr=1", "lr=2", *WORDS, "--json"]) == 11
    found = json.loads(capsys.readouterr().out)["seeds_without_effect"]
    assert [line[:8] for line in found] == ["A: seeds", "B: seeds"]


@pytest.mark.skipif(machine.cores() < 2, reason="two runs at a time need two cores")
def test_a_machine_with_too_few_devices_writes_nothing(program, capsys, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--run", RUN, "lr=1", "lr=2", *WORDS, "--parallel", "--name", "x", "--out", "proof"]
    assert compare.main(words) == 11, "two cores are two devices"
    monkeypatch.setenv("OMP_NUM_THREADS", "1000")
    monkeypatch.chdir(elsewhere := tmp_path_factory.mktemp("elsewhere"))
    capsys.readouterr()
    assert compare.main(["--reproduce", str(program / "proof")]) == 2
    said = capsys.readouterr()
    assert "--parallel: there are no two equal devices for the sides of a pair" in said.err
    assert (said.out, list(elsewhere.iterdir())) == ("", [])


def test_another_machine_runs_it_again(proof, capsys, tmp_path_factory, monkeypatch):
    """In a folder that has neither the training nor its repository."""
    monkeypatch.chdir(elsewhere := tmp_path_factory.mktemp("elsewhere"))
    assert compare.main(["--reproduce", str(proof), "--name", "y", "--out", "mine", "--quiet"]) == 11
    again = pairs.read(elsewhere / "ray_results/y")
    assert [run.seed for run in again.runs[0]] == [run.seed for run in pairs.read(proof).runs[0]]
    assert compare.main(["--reproduce", str(proof), "--pairs", "5"]) == 2
    assert "--pairs: 5 is not allowed; allowed: what --reproduce finds in its folder" in capsys.readouterr().err
    code, output = verified(capsys, proof, elsewhere / "mine")
    first, second = output["folders"]
    assert (code, first["a_values"]) == (0, second["a_values"]), "the program gives the same values everywhere"


def test_a_folder_of_a_comparison_is_no_proof(proof, capsys):
    assert verify.main(["ray_results/x"]) == 2
    assert "has no proof.json" in capsys.readouterr().err


def test_a_revision_is_copied_after_its_worktree_has_gone(program):
    Path("train.py").write_text(NOISY.replace("options.lr *", "2 * options.lr *"))
    words = ["--run", RUN, "--at", "HEAD", "--at", ".", "lr=1", *WORDS, "--out", "proof"]
    assert compare.main(words) == 11
    assert Path("proof/A/source/train.py").read_text() == NOISY
    assert "2 * options.lr" in Path("proof/B/source/train.py").read_text()
    assert verify.main(["proof"]) == 0


def test_an_edit_meanwhile_is_noted(program, capsys):
    """The working copy is edited by the command itself, as a person would while it runs."""
    Path("train.py").write_text(NOISY + "\nopen('train.py', 'a').write('# more')\n")
    assert compare.main(["--run", RUN, "lr=1", "lr=2", *WORDS, "--out", "proof"]) == 11
    code, output = verified(capsys, "proof")
    assert code == 1
    assert "A: its files changed while it ran" in output["folders"][0]["notes"][0]


def test_out_is_a_new_folder(program, capsys):
    (program / "proof").mkdir()
    (program / "proof/file").write_text("")
    assert compare.main(["--run", RUN, "lr=1", "lr=2", *WORDS, "--out", "proof"]) == 2
    assert "--out: 'proof' is not allowed; allowed: a new folder" in capsys.readouterr().err
    assert not os.path.exists("ray_results")


REFERENCE = Path(__file__).parents[2] / "ray_results" / "reference" / "speedrun-digits"


@pytest.mark.parametrize(
    ("change", "verdict"), [("momentum", "better"), ("he", "better"), ("smoothing", "no significant difference")]
)
def test_the_kept_speedrun_is_verified_in_any_clone(capsys, change, verdict):
    code, output = verified(capsys, REFERENCE / change)
    assert (code, output["folders"][0]["faults"]) == (0, [])
    assert output["folders"][0]["verdict"] == verdict
