"""The loop of docs/agents.md runs as it stands there, with a command that only answers."""

import os
import re
import subprocess
from pathlib import Path

import pytest

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
