"""A coding agent's client drives the whole work by tools alone."""

import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import searches
from tunediff import mcp
from tunediff.core.lock import exclusive_lock

# Imported where it is used: every worker of pytest reads this file, and one of them runs it.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="needs mcp")
PLAIN = Path(__file__).parent / "users" / "plain.py"


def session(body, server):
    """What `body` returns, which calls tools of a client that is connected to the server."""

    from mcp import Client

    async def run():
        async with Client(server) as client:

            async def call(tool, **arguments):
                answer = await client.call_tool(tool, arguments)
                text = answer.content[0].text
                return text if answer.is_error else json.loads(text)

            return await body(call)

    return asyncio.run(run())


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server whose commands only note what they are asked for."""
    (stub := tmp_path / "stub.py").write_text(
        "import json, pathlib, sys\n"
        "command, *words = sys.argv[1:]\n"
        "options = dict(word[2:].partition('=')[::2] for word in words if word.startswith('--'))\n"
        "if 'bad' in words: sys.exit(print('error: bad: is not allowed', file=sys.stderr) or 2)\n"
        "if 'name' in options and 'slow' in words: import time; time.sleep(600)\n"
        "if 'name' in options: pathlib.Path(options['storage'], options['name']).mkdir()\n"
        "if 'name' in options: print('the last words:', *words, file=sys.stderr)\n"
        "print(json.dumps({'command': command, 'words': words}, indent=2))\n"
    )
    monkeypatch.setattr(mcp, "PYTHON", (sys.executable, str(stub)))
    return mcp.serve(tmp_path / "results")


MINE = {"command": "search", "words": ["mine.py", "lr=0.01", "--trials", "4", "--budget", "5s"]}


def test_mcp_starts_only_what_a_dry_run_has_priced(server, tmp_path):
    async def body(call):
        refused = await call("start", token="made up")
        planned = await call("run", **MINE)
        started = await call("start", token=planned["token"])
        again = await call("start", token=planned["token"])
        while (status := await call("status", name=started["name"]))["running"]:
            await asyncio.sleep(0.02)
        return refused, planned, started, again, status

    refused, planned, started, again, status = session(body, server)
    assert "token: 'made up' is not allowed" in refused
    storage = f"--storage={tmp_path / 'results'}"
    dry = [*MINE["words"], storage, "--dry-run", "--json"]
    assert planned == {"command": "search", "words": dry, "token": started["name"]}
    ran = [*MINE["words"], f"--name={started['name']}", storage, "--json"]
    latest = [f"the last words: {' '.join(ran)}"]  # the JSON is what result returns
    assert status == {"running": False, "exit_code": 0, "latest": latest}
    assert "is not allowed" in again, "a token starts one search"


def test_mcp_runs_one_at_a_time_and_stops_it(server):
    async def body(call):
        slow = {"command": "compare", "words": ["slow", "lr=1"]}
        first, second = [(await call("run", **slow))["token"] for _ in range(2)]
        started = await call("start", token=first)
        return started, await call("start", token=second), await call("stop", name=started["name"])

    started, refused, stopped = session(body, server)
    assert started["name"] in refused
    assert (stopped["running"], stopped["exit_code"]) == (False, -15)


def test_mcp_starts_nothing_beside_a_search_that_runs_in_a_shell(server, tmp_path):
    (tmp_path / "results" / "earlier").mkdir(parents=True)

    async def body(call):
        return await call("start", token=(await call("run", **MINE))["token"])

    with exclusive_lock(tmp_path / "results" / "earlier"):
        assert "earlier" in session(body, server)


def test_mcp_stops_no_process_of_this_machine_for_a_search_of_another_one(server, tmp_path):
    (tmp_path / "results" / "night").mkdir(parents=True)
    with subprocess.Popen(["sleep", "60"]) as unrelated:
        (tmp_path / "results/night/.lock").write_text(f"another-host {unrelated.pid} 1.0")
        refused = session(lambda call: call("stop", name="night"), server)
        alive = unrelated.poll() is None
        unrelated.kill()
    assert "what this server has started" in refused
    assert alive


def test_mcp_result_runs_a_users_file_in_a_process_of_its_own(tmp_path, capfd, at_tmp_path):
    Path("mine.py").write_text(
        "import os, pathlib\nos.system('echo by descriptor')\npathlib.Path('pid').write_text(str(os.getpid()))\n"
        + PLAIN.read_text()
    )
    searches.make(
        tmp_path / "results" / "night", {**searches.FILE, "workload": "mine.py", "search": {"lr": [0.01, 0.1]}}
    )
    capfd.readouterr()
    assert mcp.Tools(tmp_path / "results").result("night")["search"]["trials"] == 0
    assert capfd.readouterr().out == "", "stdout is the client's"
    assert int(Path("pid").read_text()) != os.getpid()


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        (
            "run",
            {"command": "train", "words": ["digits"]},
            "should be 'doctor', 'knobs', 'export', 'search' or 'compare'",
        ),
        ("run", {"command": "search", "words": ["--force"]}, "words: '--force' is not allowed"),
        ("run", {"command": "search", "words": ["--stor=x"]}, "words: '--stor' is not allowed"),
        ("run", {"command": "search", "words": ["bad"]}, "Error executing tool run: bad: is not allowed"),
        ("status", {"name": "none"}, "name: 'none' is not allowed"),
        ("result", {"name": "../x"}, "name: '../x' is not allowed"),
    ],
)
def test_mcp_says_what_is_not_allowed(server, tool, arguments, message):
    assert message in session(lambda call: call(tool, **arguments), server)


@pytest.mark.nightly
@pytest.mark.cluster
def test_an_agent_finishes_by_tools_alone(tmp_path, at_tmp_path):
    """Doctor, dry run, search, compare, export, over stdio."""
    shutil.copy(PLAIN, tmp_path / "mine.py")
    from mcp import StdioServerParameters

    server = StdioServerParameters(command=sys.executable, args=["-m", "tunediff.mcp"], cwd=str(tmp_path))

    async def body(call):
        async def finished(token):
            started = await call("start", token=token)
            while (await call("status", name=started["name"]))["running"]:
                await asyncio.sleep(0.5)
            return started["name"], await call("result", name=started["name"])

        doctor = await call("run", command="doctor", words=[])
        knobs = await call("run", command="knobs", words=["--workload=mine.py", "lr"])
        planned = await call("run", command="search", words="mine.py --trials 2 --budget 1s --confirm 0".split())
        name, found = await finished(planned["token"])
        best = await call("run", command="export", words=[name, f"--out={tmp_path}/best.yaml"])
        pairs = await call("run", command="compare", words="mine.py lr=0.03 --budget 1s --pairs 3".split())
        _, compared = await finished(pairs["token"])
        return doctor, knobs, planned, found, best, compared

    doctor, knobs, planned, found, best, compared = session(body, server)
    assert doctor["findings"]
    assert [knob["name"] for knob in knobs["knobs"]] == ["lr"]
    assert planned["trials"] == 2
    assert found["candidates"][0]["value"] is not None
    assert Path(best["configuration"]).exists()
    assert compared["verdict"] in ("better", "worse", "no_difference")
