"""The loop of docs/agents.md runs as it stands there, with a command that only answers."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

import tunediff
from tunediff import __main__ as overview
from tunediff import cli, compare

PAGE = (Path(__file__).parent.parent / "docs" / "agents.md").read_text()
LOOP = re.search(r"```sh\n(.*?)```", PAGE, re.S)[1]
TUNEDIFF = """#!/bin/sh
echo "$@" >> asked
read code < answers && sed -i 1d answers
echo '{"verdict": "made up"}'
exit $code
"""
PROPOSE = """#!/bin/sh
[ -s answers ] || exit 1
echo "change $(wc -l < answers)" >> mine.py
"""


@pytest.fixture
def loop(tmp_path, monkeypatch):
    """Run the loop with these exit codes of the command, one for every proposal."""
    who = {"GIT_AUTHOR_NAME": "me", "GIT_AUTHOR_EMAIL": "me@example.org", "GIT_CONFIG_GLOBAL": "/dev/null"}
    who |= {"GIT_COMMITTER_NAME": "me", "GIT_COMMITTER_EMAIL": "me@example.org"}
    environment = os.environ | who | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def run(*words):
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)

    def loop(*codes):
        for name, text in (("tunediff", TUNEDIFF), ("propose", PROPOSE), ("loop.sh", LOOP), ("mine.py", "start\n")):
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        (tmp_path / "answers").write_text("".join(f"{code}\n" for code in codes))
        for words in (["init", "-q"], ["add", "mine.py"], ["commit", "-qm", "start"]):
            assert run("git", *words).returncode == 0
        done = run("sh", "loop.sh")
        commits = run("git", "log", "--format=%s", "--", "mine.py").stdout.splitlines()
        return done.returncode, (tmp_path / "mine.py").read_text().splitlines(), commits

    loop.asked = lambda: (tmp_path / "asked").read_text().splitlines()
    return loop


def test_what_is_better_is_kept_and_nothing_else(loop):
    code, lines, commits = loop(0, 10, 11, 12, 2, 0)
    assert (code, lines) == (0, ["start", "change 6", "change 1"])
    assert commits == ['Better: {"verdict": "made up"} '.rstrip()] * 2 + ["start"]
    assert set(loop.asked()) == {"compare mine.py@HEAD mine.py --budget 60s --ledger --json"}


@pytest.mark.parametrize("stopped", [1, 130])
def test_it_stops_when_nothing_was_learned(loop, stopped):
    assert loop(10, stopped, 0)[:2] == (stopped, ["start", "change 2"])


def test_its_command_takes_these_options():
    words = re.search(r"tunediff compare (.*?) > ", LOOP)[1].split()
    asked = compare.arguments(words)
    assert (asked.words, asked.budget, asked.as_json) == (("mine.py@HEAD", "mine.py"), 60.0, True)


def test_every_exit_code_is_there():
    said = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", PAGE, re.M) for code in row.split(",")}
    assert said == {*compare.EXITS.values(), cli.FAILED, cli.BAD_INPUT, cli.INTERRUPTED}


# ------------------------------------- what the GitHub Action and the GitLab template run, with stubs of what they call
ROOT = Path(__file__).parent.parent
STUBS = {
    "python": 'echo "python $*" >> calls; case $* in *compare*) for last; do :; done; echo "**a verdict**" > "$last"; exit $CODE;; esac',
    "gh": 'echo "gh $*" >> calls; cat "${@: -1}" >> comments',
    "curl": 'echo "curl $*" >> calls; cat tunediff.md >> comments',
}
GITHUB = {
    "WORKLOAD": "mine.py", "BUDGET": "60s", "PAIRS": "12", "FAIL_ON": "worse failed", "PACKAGE": "", "BASE": "abc",
    "PULL_REQUEST": "7", "GITHUB_REPOSITORY": "me/mine", "RUNNER_TEMP": ".", "GITHUB_STEP_SUMMARY": "summary",
}  # fmt: skip
GITLAB = {
    "WORKLOAD": "mine.py", "BUDGET": "60s", "PAIRS": "12", "FAIL_ON": "worse failed", "PACKAGE": "",
    "CI_MERGE_REQUEST_DIFF_BASE_SHA": "abc", "TUNEDIFF_TOKEN": "t", "CI_API_V4_URL": "https://here/api/v4",
    "CI_PROJECT_ID": "3", "CI_MERGE_REQUEST_IID": "7",
}  # fmt: skip


def script(name):
    if name == "github":
        return yaml.safe_load((ROOT / ".github/actions/compare/action.yml").read_text())["runs"]["steps"][0]["run"]
    return yaml.safe_load((ROOT / ".gitlab/compare.yml").read_text())[".tunediff-compare"]["script"][0]


@pytest.mark.parametrize(("code", "fails"), [(0, False), (10, False), (11, True), (12, True), (2, True)])
@pytest.mark.parametrize(("name", "variables"), [("github", GITHUB), ("gitlab", GITLAB)])
def test_pipelines_comment_the_verdict_and_fail_on_what_is_asked(tmp_path, name, variables, code, fails):
    (tmp_path / "bin").mkdir()
    for stub, content in STUBS.items():
        (tmp_path / "bin" / stub).write_text(f"#!/usr/bin/env bash\n{content}\n")
        (tmp_path / "bin" / stub).chmod(0o755)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CODE": str(code), **variables}
    shell = ["bash", "-eo", "pipefail", "-c"] if name == "github" else ["bash", "-e", "-c"]
    done = subprocess.run([*shell, script(name)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode != 0) == fails, done.stderr
    calls = (tmp_path / "calls").read_text()
    assert "-m tunediff.compare mine.py@abc mine.py --budget 60s --pairs 12 --comment" in calls
    commented = (tmp_path / "comments").exists()
    assert commented == (code != 2), "a refused comparison has no verdict"
    if commented:
        assert (tmp_path / "comments").read_text() == "**a verdict**\n"
        assert ("gh pr comment 7 --repo me/mine" in calls) or ("merge_requests/7/notes" in calls)


# ------------------------------------------------------------------------- `python -m tunediff`: the commands there are
PACKAGE = Path(tunediff.__file__).parent


def test_overview_lists_every_command(capsys):
    assert overview.main([]) == 0
    listed = set(re.findall(r"^tunediff (\w+) ", capsys.readouterr().out, re.MULTILINE)) - {"finds"}
    files = [*PACKAGE.glob("*.py"), *PACKAGE.glob("*/__main__.py")]
    runs = {path.parent.name if path.name == "__main__.py" else path.stem for path in files
            if re.search(r"^if __name__ == .__main__.:", path.read_text(), re.MULTILINE)}  # fmt: skip
    assert listed == runs - {"tunediff", "__main__", "judging"} | {"judge"}


def test_overview_says_the_version(capsys):
    assert overview.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tunediff {tunediff.__version__}\n"


def test_command_after_the_name_of_the_program_runs_with_its_own_words(capsys):
    assert overview.main(["knobs", "loader.workers"]) == 0
    assert capsys.readouterr().out.startswith("loader.workers: a whole number")
    assert overview.main(["doctor", "--nosuch"]) == 2
    assert "unrecognized arguments: --nosuch" in capsys.readouterr().err


def test_unknown_command_is_refused_with_what_is_near(capsys):
    assert overview.main(["serch"]) == 2
    assert "'serch' is not allowed; did you mean search" in capsys.readouterr().err
