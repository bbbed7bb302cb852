"""Runs that are forked from a template: nothing of one reaches the next, and none outlives its parent."""

import contextlib
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from tests import template_runs
from tunediff.core.template import Template, TemplateError


@contextlib.contextmanager
def template(*acts, base=None):
    with Template(template_runs.prepare, acts, base=base) as made:
        yield made


@pytest.fixture(scope="module", params=["", "thread"])
def reused(request):
    """Templates whose runs are forked, and those whose file has started a thread."""
    with template(request.param) as made:
        yield made


def is_alive(pid):
    try:  # it may end between two looks at it
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(*pids):
    """Whether these processes end soon."""
    until = time.monotonic() + 120.0
    while time.monotonic() < until:
        if not any(map(is_alive, pids)):
            return True
        time.sleep(0.05)
    return False


def test_a_run_leaves_nothing_to_the_next(reused):
    answers = []
    for name in ("a", "b"):
        run = reused.start(template_runs.echo, name)
        answers.append(run.receive())
        assert run.receive() is None
    assert [(content, mark, marks) for content, _, mark, marks in answers] == [("a", None, []), ("b", None, [])]
    assert answers[0][1] != answers[1][1]
    assert reused.unsafe in ("", "it has started threads (reader)")


@pytest.mark.parametrize(
    ("function", "content", "reason"),
    [
        ("fail", "no data", "RuntimeError: no data"), ("leave", 3, "the process of the run ended with exit code 3"),
        ("kill", None, "the process of the run was killed by SIGKILL"),
    ],
)  # fmt: skip
def test_a_run_that_fails_says_why_and_harms_no_other(reused, function, content, reason):
    with pytest.raises(TemplateError, match=reason):
        reused.start(getattr(template_runs, function), content).receive()
    run = reused.start(template_runs.echo, "next")
    assert run.receive()[0] == "next"
    assert run.receive() is None


@pytest.mark.parametrize(
    ("act", "reason"),
    [("fails", "^ValueError: no such file$"), ("dies", "^the template of the run was killed by SIGKILL$")],
)
def test_a_template_that_cannot_be_prepared_says_why(act, reason):
    with template(act) as made, pytest.raises(TemplateError, match=reason):
        made.start(template_runs.echo, "a")


def test_a_template_that_hangs_while_it_prepares_can_be_ended(tmp_path):
    file = tmp_path / "of.pid"
    with template(str(file), "hangs") as made:
        threading.Timer(0.5, made.kill_run).start()
        with pytest.raises(TemplateError, match="the template of the run has died"):
            made.ready()
    assert not file.exists() or gone(int(file.read_text()))


def test_a_template_killed_between_two_runs_is_noticed(tmp_path):
    file = tmp_path / "of.pid"
    with template(str(file)) as made:
        made.ready()
        psutil.Process(int(file.read_text())).kill()
        with pytest.raises(TemplateError, match="template of the run was killed"):
            made.start(template_runs.echo, "a")
        assert not made.alive


def test_what_a_run_started_ends_with_it(reused):
    run = reused.start(template_runs.spawn, "")
    pids = run.receive()
    assert run.receive() is None
    assert gone(*pids[1:])


def test_parents_that_share_a_template_share_its_memory(tmp_path):
    name, runs = str(tmp_path), []
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            parent = stack.enter_context(Template(template_runs.prepare, ["data"], shared=name))
            runs.append(parent.start(template_runs.memory, None))
        for run in runs:
            run.send("now")
        assert max(run.receive() for run in runs) < 128 / 2


def test_a_parent_that_leaves_a_shared_template_takes_its_run_alone(tmp_path):
    name, log = str(tmp_path), tmp_path / "log"
    with log.open("wb") as output, Template(template_runs.prepare, [], output, name) as stays:
        with Template(template_runs.prepare, [], shared=name) as leaves:
            pids = leaves.start(template_runs.spawn, "waits").receive()
            other = stays.start(template_runs.converse, "!")
        assert gone(*pids[1:])
        other.send("there?")
        assert other.receive() == "there?!"
        other.send("stop")
        assert other.receive() is None
        run = stays.start(template_runs.spawn, "")
        assert run.receive()[0] == pids[0]
        assert run.receive() is None
        psutil.Process(pids[0]).kill()
        assert multiprocessing.connection.wait([stays.control], 120)  # its base hangs up a moment after its end
        assert not stays.alive
        with pytest.raises(TemplateError, match="the template of the run was killed by SIGKILL"):
            stays.start(template_runs.echo, "a")
    with Template(template_runs.prepare, [], shared=name) as new:
        assert new.start(template_runs.echo, "again").receive()[0] == "again"


HANGS = """
import sys
from tests import template_runs
from tunediff.core.template import Template
template = Template(template_runs.prepare, [sys.argv[1], "hangs"], shared=sys.argv[1])
template.ready()
"""


def test_a_shared_template_that_hangs_while_it_prepares_ends_with_its_parent(tmp_path):
    file = tmp_path / "of.pid"
    with subprocess.Popen([sys.executable, "-c", HANGS, str(file)], cwd=os.getcwd()) as parent:
        while not (file.exists() and file.read_text()):
            assert parent.poll() is None
            time.sleep(0.05)
        parent.kill()
    assert gone(int(file.read_text()))


def test_parents_that_agree_on_them_share_a_template_whatever_their_path_and_environment(tmp_path, monkeypatch):
    agreed = {"shared": str(tmp_path), "variables": {"OF_TEMPLATE": "1"}}
    with Template(template_runs.prepare, [], **agreed) as early:
        early.ready()
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
        with Template(template_runs.prepare, [], **agreed) as late:
            templates = [one.start(template_runs.environment, None).receive() for one in (early, late)]
    assert [environment.get("OMP_NUM_THREADS") for _, environment in templates][1] == "7"
    assert len({template for template, _ in templates}) == 1
    assert "OF_TEMPLATE" not in templates[0][1]


def test_templates_of_a_base_have_what_it_has_imported_and_the_state_of_their_parent(
    tmp_path, monkeypatch, at_tmp_path
):
    """The file is imported after the fork, in each template; the path of the user's files is not that of the base."""
    (tmp_path / "loaded.py").write_text("import os; os.environ['LOADED'] = '1'")
    monkeypatch.syspath_prepend(tmp_path)
    base, cores = template_runs.prepare_base, os.sched_getaffinity(0)
    with template(str(tmp_path / "loaded.py"), base=base) as one:
        first = one.start(template_runs.origin, None).receive()
        monkeypatch.setenv("TUNEDIFF_OTHER", "2")
        os.sched_setaffinity(0, {min(cores)})
        try:
            with template(base=base) as other:
                second = other.start(template_runs.origin, None).receive()
        finally:
            os.sched_setaffinity(0, cores)
    assert first["base"] == second["base"] != ""
    assert (first["loaded"], second["loaded"]) == (True, False)
    assert (first["folder"], second["cores"], second["environment"].get("TUNEDIFF_OTHER")) == (str(tmp_path), 1, "2")
    assert "LOADED" in first["environment"]
    assert str(tmp_path) not in first["path of base"]


@pytest.mark.parametrize("shared", ["", "shared"])
@pytest.mark.parametrize("killed", ["parent", "base", "template"])
def test_nothing_outlives_its_parent(killed, shared, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", template_runs.PARENT, shared and str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=os.getcwd(),
        start_new_session=True,
    )
    above, *below = map(int, process.stdout.readline().split())
    {"parent": psutil.Process(process.pid), "base": psutil.Process(above).parent()}.get(
        killed, psutil.Process(above)
    ).kill()
    try:
        assert gone(above, *below), "the run, or what it has started"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
