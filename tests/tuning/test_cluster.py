"""Searches on a Ray cluster of several nodes, here as several raylets on one machine: run with `-m nightly`."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from tests.tuning.conftest import WAIT_S

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

CLUSTER = """
import socket, sys
from ray.cluster_utils import Cluster
with socket.create_server(("127.0.0.1", 0)) as free:  # another cluster of this machine may have Ray's own port
    port = free.getsockname()[1]
head = {"num_cpus": 1, "include_dashboard": True, "dashboard_port": port}
cluster = Cluster(initialize_head=True, head_node_args=head)
print(cluster.address, flush=True)
for line in sys.stdin:
    node = cluster.add_node(num_cpus=int(line))
    print(node.all_processes["raylet"][0].process.pid, flush=True)
"""
"""A head of one core, and a node of as many cores as each line says."""
NETWORK = "10.231.7"
"""Of a node with a network of its own."""
GRID = {"budget": {"per_trial": "6s", "trials": 6}, "grid": {"loader.batch_size": [16, 24, 32, 48, 64, 128]}}


class Nodes:
    def __init__(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", CLUSTER], **pipes)
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
        for _ in range(5):  # beside other load a raylet may end as it starts
            node = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
            self.others.append(node)
            if any("Ray runtime started" in line for line in node.stdout):
                return
        pytest.fail("a node without the folder does not start")

    def close(self):
        end([*self.others, self.process])


class Apart:
    """A head here and a node behind a network cable that can be pulled, of one core each."""

    def __init__(self, folder):
        self.space = f"tunediff-{os.getpid()}"
        cable = f"""
            set -e
            ip netns add {self.space}
            ip link add td0 type veth peer name td1 netns {self.space}
            ip addr add {NETWORK}.1/24 dev td0
            ip link set td0 up
            ip -n {self.space} addr add {NETWORK}.2/24 dev td1
            ip -n {self.space} link set td1 up
            ip -n {self.space} link set lo up"""
        if os.geteuid() or subprocess.run(["sh", "-c", cable], check=False).returncode:
            pytest.skip("a node behind a cable needs a network namespace")
        self.address, self.folder, self.others = f"{NETWORK}.1:6399", folder, []
        self.start(f"--head --port 6399 --node-ip-address {NETWORK}.1")
        self.start(f"--address {self.address} --node-ip-address {NETWORK}.2", "ip", "netns", "exec", self.space)

    def start(self, words, *inside):
        ray = [*inside, os.path.join(os.path.dirname(sys.executable), "ray"), "start", "--num-cpus", "1", "--block"]
        with open(self.folder / f"node{len(self.others)}.log", "w") as log:
            node = subprocess.Popen([*ray, *words.split()], stdout=log, stderr=log, start_new_session=True)
        self.others.append(node)
        until = time.monotonic() + WAIT_S
        while "Ray runtime started" not in (told := (self.folder / log.name).read_text()):
            assert node.poll() is None and time.monotonic() < until, told  # noqa: PT018
            time.sleep(0.2)

    def cable(self, state):
        subprocess.run(["ip", "link", "set", "td0", state], check=True)

    def slow(self):
        """Four megabits per second, each way."""
        there = ("tc", "qdisc", "add", "dev", "td1"), ("ip", "netns", "exec", self.space)
        limit = ("root", "tbf", "rate", "4mbit", "burst", "32kbit", "latency", "400ms")
        if subprocess.run([*there[1], *there[0], *limit], check=False).returncode:
            pytest.skip("a slow network needs tc")
        subprocess.run(["tc", "qdisc", "add", "dev", "td0", *limit], check=True)

    def behind_it(self, pid):
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")
        return False

    def close(self):
        end(self.others)
        subprocess.run(["sh", "-c", f"ip link del td0; ip netns del {self.space}"], check=False)


def end(processes):
    """And all that they have started."""
    family = [
        one for process in processes if process.poll() is None for one in psutil.Process(process.pid).children(True)
    ]
    for process in [*processes, *family]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=WAIT_S)


@pytest.fixture(autouse=True)
def _ray_as_the_tests_need_it(monkeypatch):
    """`ray start` leaves the address of its cluster in a file, where others would find it; asks for a token where one
    lies about; and gives up soon beside other load."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        monkeypatch.setenv("RAY_raylet_start_wait_time_s", "300")
        yield


@pytest.fixture
def nodes():
    with contextlib.closing(Nodes()) as made:
        yield made


@pytest.fixture
def apart(tmp_path):
    with contextlib.closing(Apart(tmp_path)) as made:
        yield made


def ran_on(one, name, raylet):
    """Whether the last attempt of a trial has its worker on the node of this raylet."""
    try:
        run = psutil.Process(one.events(name, "worker")[-1]["pid"])
        return run.environ()["RAY_RAYLET_PID"] == str(raylet)  # its template has no parent: slots share it
    except (psutil.NoSuchProcess, IndexError, KeyError):
        return False


def test_what_does_not_fit_and_what_is_not_shared_is_refused(nodes, search, tmp_path):
    nodes.add()
    one = search("large", fixed={"parallel.workers": 4}, **GRID)
    assert one.start(str(one.file), "--name", "large", "--address", nodes.address).wait(WAIT_S) == 2
    assert "parallel.workers: 4 is not allowed on this cluster; each worker needs one CPU core and there are" in one.log
    assert one.log.count(": 1 CPU core, 0 GPUs") == 2
    assert "allowed: at most 2" in one.log

    one.storage.mkdir(exist_ok=True)
    if subprocess.run(["unshare", "--mount", "--map-root-user", "true"], check=False).returncode:
        pytest.skip("a node without the folder needs a mount namespace")
    nodes.add_without(one.storage)
    two = search("apart", **GRID)
    assert two.start(str(two.file), "--name", "apart", "--address", nodes.address).wait(WAIT_S) == 2
    assert "is not shared by all nodes" in two.log
    assert "No such file or directory" in two.log
    assert not one.folder.exists(), "nothing of what was refused is left"


def test_a_search_survives_a_node(nodes, search):
    """Two nodes of one core run two trials at once; one dies with a trial on it."""
    doomed = nodes.add()
    one = search("night", **GRID)
    process = one.start(str(one.file), "--name", "night", "--address", nodes.address)
    names = [f"t{number:04d}" for number in range(6)]
    victim = one.wait_for(lambda: next((n for n in names if ran_on(one, n, doomed) and one.events(n, "point")), None))
    for process_of_it in [psutil.Process(doomed), *psutil.Process(doomed).children(recursive=True)]:
        process_of_it.kill()  # as a machine dies: workers that outlive their raylet end their trial
    assert process.wait(WAIT_S) == 0, one.log
    assert [one.trial(name).status for name in names] == ["ok"] * 6
    ran = [one.trial(name) for name in names]
    assert any(a.started < b.started < a.ended for a in ran for b in ran), "two at once"
    assert one.events(victim, "lost")
    steps = [line["steps"] for line in one.events(victim, "point")]
    assert steps == sorted(set(steps)), "it went on from its checkpoint"


@pytest.mark.parametrize("fault", ["cut for a minute", "slow"])
def test_a_bad_network(apart, search, fault):
    """Cut, the node behind it is lost, its trial goes on here, and what comes back late from there is not taken, or
    Ray waits for it, if it is back in time; slow, it only takes longer."""
    if fault == "slow":
        apart.slow()
    one = search("cut", **GRID)
    process = one.start(str(one.file), "--name", "cut", "--address", apart.address)
    names = [f"t{number:04d}" for number in range(6)]

    def there(name):
        worker = one.events(name, "worker")
        return worker and apart.behind_it(worker[-1]["pid"]) and one.events(name, "point")

    victim = one.wait_for(lambda: next((name for name in names if there(name)), None))
    if fault != "slow":
        apart.cable("down")
        time.sleep(60)
        apart.cable("up")
    assert process.wait(WAIT_S) == 0, one.log
    assert [one.trial(name).status for name in names] == ["ok"] * 6, one.log
    assert fault != "slow" or not one.events(victim, "lost"), one.log
    for name in names:
        assert [event["index"] for event in one.events(name, "point")] == [1, 2], one.log


def test_the_head_dies_and_another_cluster_goes_on(nodes, search):
    """With the head its search ends and says how to resume; nothing that was measured is measured again."""
    nodes.add()
    one = search("headless", **GRID)
    process = one.start(str(one.file), "--name", "headless", "--address", nodes.address)
    one.wait_for(lambda: (found := one.trial("t0002")) is not None and found.points)
    end([nodes.process])
    assert process.wait(WAIT_S) == 1
    assert "error: the head of the cluster does not answer any more; everything measured is in" in one.log
    assert f"resume: tunediff search --resume headless --address {nodes.address}" in one.log
    before = one.journals
    with contextlib.closing(Nodes()) as others:
        others.add()
        assert one.start("--resume", "headless", "--address", others.address).wait(WAIT_S) == 0, one.log
    assert [one.trial(f"t{number:04d}").status for number in range(6)] == ["ok"] * 6
    assert all(one.journals[name].startswith(text) for name, text in before.items())
    for number in range(6):
        assert [event["index"] for event in one.events(f"t{number:04d}", "point")] == [1, 2]
