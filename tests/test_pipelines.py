"""What the GitHub Action and the GitLab template run, with stubs of what they call."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

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
