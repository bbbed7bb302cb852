"""What the templates of `test_template.py` prepare and run."""

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def prepare(options):
    """Do what a user's file may do while it is imported."""
    for act in options:
        if act == "data":
            sys.data = b"1" * (128 << 20)
        elif act == "thread":
            threading.Thread(target=time.sleep, args=(60,), daemon=True, name="reader").start()
        elif act == "fails":
            raise ValueError("no such file")
        elif act == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif act == "hangs":
            time.sleep(600)
        elif act.endswith(".pid"):
            Path(act).write_text(str(os.getpid()))
        elif act.endswith(".py"):
            sys.path.insert(0, os.path.dirname(act))
            importlib.import_module("loaded")


BASE = {}


def prepare_base(options):
    BASE.update(pid=os.getpid(), path=list(sys.path))


def origin(connection, content):
    """Send what this process has of its base, its template and its parent."""
    facts = {"base": BASE.get("pid", ""), "path of base": BASE.get("path", []), "loaded": "loaded" in sys.modules}
    facts |= {"folder": os.getcwd(), "cores": len(os.sched_getaffinity(0)), "environment": dict(os.environ)}
    connection.send(facts)


def memory(connection, content):
    """Send, in MiB, the share of this process in the memory that it uses, once it is asked for."""
    connection.recv()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    connection.send(next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")))
    connection.recv()


def echo(connection, content):
    """Send the content and what is left of earlier runs; set a mark of its own."""
    connection.send((content, os.getpid(), os.environ.pop("MARK", None), sorted(vars(sys).get("marks", []))))
    os.environ["MARK"] = content
    sys.marks = [*vars(sys).get("marks", []), content]


def environment(connection, content):
    """Send the template's pid and the run's environment."""
    connection.send((os.getppid(), dict(os.environ)))


def converse(connection, content):
    while (message := connection.recv()) != "stop":
        connection.send(message + content)


def fail(connection, content):
    raise RuntimeError(content)


def leave(connection, status):
    os._exit(status)


def kill(connection, content):
    os.kill(os.getpid(), signal.SIGKILL)


def spawn(connection, content):
    """Start a process that would stay, and heeds no signal that it can ignore, then send the pids."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGIO, signal.SIG_IGN); time.sleep(600)"]
    )
    connection.send((os.getppid(), os.getpid(), child.pid))
    if content == "waits":
        time.sleep(600)


PARENT = """
import os, sys, time
from tunediff.core.template import Template
from tests import template_runs
template = Template(template_runs.prepare, [], shared=sys.argv[1])
run = template.start(template_runs.spawn, "waits")
if not os.fork():  # holds the connections open when its parent is gone
    time.sleep(600)
print(*run.receive(), flush=True)
try:
    run.receive()
finally:
    time.sleep(600)
"""
