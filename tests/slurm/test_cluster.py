"""The SLURM that the other tests here run on."""

import shutil

import pytest
from cluster import Cluster, why_not

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]


@pytest.fixture
def own_cluster(tmp_path):
    """Beside that of the session: two clusters do not meet."""
    if reason := why_not():
        pytest.skip(reason)
    cluster = Cluster(f"gpuwatch-test{tmp_path.stat().st_ino}")
    yield cluster
    cluster.down()
    shutil.rmtree(cluster.folder)


def test_up_twice_does_no_harm_and_down_leaves_nothing(own_cluster):
    own_cluster.up()
    pids = [own_cluster.init_of(node) for node in own_cluster.nodes]
    own_cluster.up()
    assert [own_cluster.init_of(node) for node in own_cluster.nodes] == pids
    names = own_cluster.run(["srun", "--nodes=2", "hostname"])
    assert sorted(names.stdout.split()) == ["node-0", "node-1"]

    own_cluster.down()
    own_cluster.down()
    assert not any(own_cluster.takes_jobs(node) for node in own_cluster.nodes)
    assert {path.name for path in own_cluster.folder.iterdir()} == {"log", "lock", f"{own_cluster.name}.hosts"}
    own_cluster.up()
    assert all(own_cluster.takes_jobs(node) for node in own_cluster.nodes)


@pytest.mark.soak
def test_nodes_that_were_lost_come_back(own_cluster):
    own_cluster.up()
    first, second = own_cluster.nodes
    own_cluster.power_off(first)
    own_cluster.kill_slurmd(second)
    own_cluster.run(["scontrol", "update", f"nodename={second.host}", "state=drain", "reason=test"])
    own_cluster.up()
    assert sorted(own_cluster.run(["srun", "--nodes=2", "hostname"]).stdout.split()) == ["node-0", "node-1"]
