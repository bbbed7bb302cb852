"""Searches on a Ray cluster of several nodes, here as several raylets on one machine: run with `-m slow`."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ray._private.utils import get_ray_address_file

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": True})
print(cluster.address, flush=True)
for line in sys.stdin:
    node = cluster.add_node(num_cpus=int(line))
    print(node.all_processes["raylet"][0].process.pid, flush=True)
"""
"""A head of one core, and a node of as many cores as each line says."""
GRID = {"budget": {"per_trial": "6s", "trials": 6}, "grid": {"loader.batch_size": [16, 24, 32, 48, 64, 128]}}


class Nodes:
    def __init__(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        patient = {**os.environ, "RAY_raylet_start_wait_time_s": "300"}
        self.process = subprocess.Popen([sys.executable, "-c", CLUSTER], env=patient, **pipes)
        self.address = self.process.stdout.readline().strip()
        self.others = []

    def add(self, cpus=1):
        """The process id of its raylet."""
        print(cpus, file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def add_without(self, folder):
        """A node that sees an empty folder there: a mount namespace of its own."""
        ray = os.path.join(os.path.dirname(sys.executable), "ray")
        start = f"mount -t tmpfs none {folder} && exec {ray} start --address {self.address} --num-cpus 1 --block"
        command = ["unshare", "--mount", "--map-root-user", "sh", "-c", start]
        self.others.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True))


@pytest.fixture
def nodes():
    made = Nodes()
    yield made
    family = psutil.Process(made.process.pid).children(recursive=True)
    for process in made.others:
        family += psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    for process in [*made.others, made.process]:
        process.kill()
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=20)
    # `ray start` leaves the address of its cluster there, and Ray Train asks a dead one whether its controllers live.
    Path(get_ray_address_file(None)).unlink(missing_ok=True)


def ran_on(one, name, raylet):
    """Whether the last attempt of a trial has its worker on the node of this raylet."""
    try:
        return raylet in [parent.pid for parent in psutil.Process(one.events(name, "worker")[-1]["pid"]).parents()]
    except (psutil.NoSuchProcess, IndexError):
        return False


def test_what_does_not_fit_and_what_is_not_shared_is_refused(nodes, search, tmp_path):
    nodes.add()
    one = search("large", fixed={"parallel.workers": 4}, **GRID)
    assert one.start(str(one.file), "--name", "large", "--address", nodes.address).wait(200) == 2
    assert "parallel.workers: 4 is not allowed on this cluster; each worker needs one CPU core and there are" in one.log
    assert one.log.count(": 1 CPU cores, 0 GPUs") == 2
    assert "allowed: at most 2" in one.log

    one.storage.mkdir(exist_ok=True)
    if subprocess.run(["unshare", "--mount", "--map-root-user", "true"], check=False).returncode:
        pytest.skip("a node without the folder needs a mount namespace")
    nodes.add_without(one.storage)
    two = search("apart", **GRID)
    process = two.start(str(two.file), "--name", "apart", "--address", nodes.address)
    until = time.monotonic() + 600  # the node may join before the search looks, which ends it, or after that
    while process.poll() is None and "a node has come and is not used" not in two.log and time.monotonic() < until:
        time.sleep(0.2)
    assert process.poll() in (None, 2)
    assert "is not shared by all nodes" in two.log
    assert "No such file or directory" in two.log
    assert not one.folder.exists(), "nothing of what was refused is left"


def test_a_search_survives_a_node_and_uses_a_new_one(nodes, search):
    """Two nodes of one core run two trials at once; one dies with a trial on it, another one comes."""
    doomed = nodes.add()
    one = search("night", **GRID)
    process = one.start(str(one.file), "--name", "night", "--address", nodes.address)
    names = [f"t{number:04d}" for number in range(6)]
    victim = one.wait_for(
        lambda: next((n for n in names if ran_on(one, n, doomed) and one.events(n, "point")), None), 600
    )
    for process_of_it in [psutil.Process(doomed), *psutil.Process(doomed).children(recursive=True)]:
        process_of_it.kill()  # as a machine dies: workers that outlive their raylet end their trial
    new = nodes.add()
    one.wait_for(lambda: next((n for n in names if ran_on(one, n, new)), None), 600)
    assert process.wait(600) == 0, one.log
    assert [one.trial(name).status for name in names] == ["ok"] * 6
    ran = [one.trial(name) for name in names]
    assert any(a.started < b.started < a.ended for a in ran for b in ran), "two at once"
    assert one.events(victim, "lost")
    steps = [line["steps"] for line in one.events(victim, "point")]
    assert steps == sorted(set(steps)), "it went on from its checkpoint"
    assert "a node has come" in one.log
