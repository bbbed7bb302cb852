"""What a search asks of the nodes of a cluster that was there before, without one; `test_cluster.py` starts some."""

import socket
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import torch

from tunediff.config import ConfigError
from tunediff.ray_backend import backend, cluster, connection, tuner
from tunediff.tuning.resources import Machine, divided

GPU = {
    "Alive": True, "NodeID": "a1b2c3d4", "NodeManagerAddress": "10.0.0.1", "Labels": {"ray.io/node-id": "a1b2c3d4"},
    "Resources": {"CPU": 16.0, "GPU": 8.0, "memory": 1e9, "node:10.0.0.1": 1.0},
}  # fmt: skip
HEAD = GPU | {"NodeID": "ffff0000", "Resources": {"memory": 1e9, "node:__internal_head__": 1.0}}


@pytest.fixture
def nodes(monkeypatch):
    """What Ray says of its nodes."""
    told = [GPU, HEAD, GPU | {"NodeID": "dead", "Alive": False}]
    monkeypatch.setattr("ray.nodes", lambda: told)
    return told


@pytest.fixture
def runtime_is(monkeypatch):
    """Lets Ray say this of the runtime of this process."""
    return lambda **context: monkeypatch.setattr("ray.get_runtime_context", lambda: types.SimpleNamespace(**context))


def test_nodes_are_what_ray_has_of_each(nodes):
    assert cluster.nodes() == [
        Machine(16, 8, "10.0.0.1 (a1b2c3)", "a1b2c3d4"), Machine(0, 0, "10.0.0.1 (ffff00)", "ffff0000"),
    ]  # fmt: skip
    assert cluster.gone(["dead", "a1b2c3d4", "never"]) == ["dead", "never"]
    assert cluster.gone([]) == []


def answers(monkeypatch, said):
    """Nodes say this, by their ids, instead of what they were asked."""
    monkeypatch.setattr(
        cluster,
        "_on_each",
        lambda machines, function, *args: {one: said.get(one.id, function(*args)) for one in machines},
    )


def test_storage_that_a_node_does_not_see_is_refused(monkeypatch, tmp_path):
    here, there = Machine(2, 0, "10.0.0.1", "a"), Machine(2, 0, "10.0.0.2", "b")
    answers(monkeypatch, {})
    cluster.check_shared(tmp_path, [here, there])
    for said in ("No such file or directory", "of another file system"):
        answers(monkeypatch, {"b": said})
        with pytest.raises(ConfigError) as refused:
            cluster.check_shared(tmp_path, [here, there])
        expected = f"--storage: {tmp_path.parent} is not shared by all nodes (10.0.0.2: {said}); put it on a disk that"
        assert str(refused.value).startswith(expected)
    assert list(tmp_path.iterdir()) == [], "the proof is taken away"


@pytest.mark.parametrize("said", ["ModuleNotFoundError: No module named 'torchvision'", "torch 1.13.1"])
def test_node_without_the_packages_of_the_head_is_refused(monkeypatch, tmp_path, said):
    """Before the first trial, and without a word of the storage, which is not to blame."""
    monkeypatch.setattr(cluster, "nodes", lambda: [Machine(2, 0, "10.0.0.1", "a"), Machine(2, 0, "10.0.0.2", "b")])

    def share(*machines):
        return divided(machines, (1,), ["none"], "x.yaml")

    answers(monkeypatch, {})
    connection._of_cluster(tmp_path, share)
    answers(monkeypatch, {"b": said})
    with pytest.raises(ConfigError) as refused:
        connection._of_cluster(tmp_path, share)
    assert str(refused.value).startswith(f"--address: node 10.0.0.2: {said} is not allowed; allowed: nodes with all")
    assert f", and torch {torch.__version__.partition('+')[0]} as here" in str(refused.value)


def test_trials_run_on_the_nodes_of_the_start_that_are_left(nodes, clock):
    """One that comes later has not been checked."""
    nodes[1:] = [GPU | {"NodeID": "other"}]
    share = divided(cluster.nodes(), (1,), [], "x.yaml", True)
    devices = backend.RayBackend(Path("x"), share, of_cluster=True).devices
    nodes[:] = [GPU | {"NodeID": "late"}, GPU | {"NodeID": "other", "Alive": False}, GPU]
    clock.s += 10
    assert devices.room()
    assert [machine.id for machine in devices.machines] == ["a1b2c3d4"]


@pytest.mark.parametrize(("head", "resource"), [(GPU, "CPU"), (HEAD, "node:10.0.0.1")])
def test_drivers_are_beside_the_search_also_on_a_head_without_cpus(nodes, runtime_is, head, resource):
    """On another node they would be lost with it, and with the second one its trial."""
    runtime_is(get_node_id=lambda: head["NodeID"])
    group = tuner.driver_resources()
    assert [list(bundle) for bundle in group.bundles] == [[resource]]
    assert f"bundle_label_selector=[{{'ray.io/node-id': '{head['NodeID']}'}}]" in repr(group)


def test_a_head_that_does_not_answer_any_more_is_noticed_once(clock, runtime_is):
    lost = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as head:
        runtime_is(gcs_address=f"127.0.0.1:{head.getsockname()[1]}")
        with cluster.head_watched(lost.set, every_s=0.2):
            for _ in range(2):
                head.accept()[0].close()
                clock.s += 0.9 * cluster.HEAD_S
            assert not lost.is_set(), "it answers"
            head.accept()[0].close()
            head.close()
            clock.s += 0.9 * cluster.HEAD_S
            assert not lost.wait(0.5), "it may come back"
            clock.s += 1.1 * cluster.HEAD_S
            assert lost.wait(600)
    lost.clear()
    with cluster.head_watched(lost.set, every_s=0.01):
        pass
    clock.s += 2 * cluster.HEAD_S
    assert not lost.wait(0.1), "the search was over before"


def test_a_killed_raylet_is_noticed(tmp_path):
    """Ray itself waits for it for ever."""
    lost, program = threading.Event(), tmp_path / "raylet"
    program.symlink_to(sys.executable)
    with (
        subprocess.Popen([program, "-ISc", "input()"], stdin=subprocess.PIPE) as raylet,
        cluster.raylet_watched(lost.set, every_s=0.01),
    ):
        assert not lost.wait(0.1)
        raylet.kill()
        assert lost.wait(600)
