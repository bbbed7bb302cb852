"""A result that a stranger can check: its folder, its verdict computed again, the same run on another machine."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.json_schemas import validate
from tunediff import TunediffError, compare, run_comparison, verify
from tunediff.analysis.comparison import Comparison
from tunediff.proof import frozen_code

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


def test_an_edit_meanwhile_is_noted(program, capsys):
    """The working copy is edited by the command itself, as a person would while it runs."""
    Path("train.py").write_text(NOISY + "\nopen('train.py', 'a').write('# more')\n")
    assert compare.main(["--run", RUN, "lr=1", "lr=2", *WORDS, "--out", "proof"]) == 11
    code, output = verified(capsys, "proof")
    assert code == 1
    assert "A: its files changed while it ran" in output["folders"][0]["notes"][0]


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
