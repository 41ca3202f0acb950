"""Differences between ranks: which are told, how, and of whom."""

import sys

import pytest
from gpuwatch.core.preflight import InventoryFacts
from gpuwatch.worker.preflight.blame.consistency import COMPARED, compare, odd_ranks, policy_of, sides_of
from gpuwatch.worker.preflight.blame.host_setups import gloo_matches, nccl_matches
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

VERSIONS = {"torch": "2.13.0", "python": "3.11.7", "gpuwatch": "0.1.0", "cuda": "12.8", "nccl": "2.27.3"}


def rank_facts(rank, per_node=8, **changed):
    """A healthy rank of a cluster with names a, b, c, ... for its nodes."""
    node, local = divmod(rank, per_node)
    facts = InventoryFacts(
        host=chr(ord("a") + node) if node < 26 else f"n{node}",
        node=node,
        boot_id=f"boot-{node}",
        device=f"cuda:{local}",
        device_name="NVIDIA H100",
        uuid=f"GPU-{node}-{local}",
        pci_bus=f"0000:{local:02x}:00.0",
        driver="550.54.15",
        versions=VERSIONS,
        environment={"NCCL_DEBUG": "WARN"},
        interfaces={"lo": ["127.0.0.1/8"], "eth0": [f"10.0.{node // 250}.{node % 250 + 1}/16", "fe80::1/64"]},
        shm_free=64 << 30,
        limits={"nofile": 1 << 20, "memlock": -1},
        script="train.py",
        script_digest="ab" * 32,
        local_rank=local,
        gpus_visible=8,
    )
    return replace(facts, **changed)


def job(world_size=16, per_node=8):
    return {rank: rank_facts(rank, per_node) for rank in range(world_size)}


def changed(facts, ranks, **values):
    return {rank: replace(known, **values) if rank in ranks else known for rank, known in facts.items()}


def with_version(facts, ranks, **versions):
    return changed(facts, ranks, versions={**VERSIONS, **versions})


def with_setting(facts, ranks, **settings):
    return changed(facts, ranks, environment=settings)


def only(findings):
    assert len(findings) == 1, [one.sentence for one in findings]
    return findings[0]


@pytest.mark.parametrize("world_size", [1, 2, 16])
def test_a_healthy_job_has_nothing_to_tell(world_size):
    assert compare(job(world_size)) == []


def test_of_nothing_known_nothing_is_said():
    assert compare({}) == []
    assert compare({rank: InventoryFacts() for rank in range(4)}) == []


@pytest.mark.parametrize(
    ("changes", "grade", "start"),
    [
        (
            {"versions": {**VERSIONS, "torch": "2.12.1"}},
            "fail",
            "torch differs: 2.12.1 on ranks 8-15 (node b), 2.13.0 on ranks 0-7, 16-23 (nodes a, c); ",
        ),
        ({"versions": {**VERSIONS, "nccl": "2.21.5"}}, "fail", "NCCL differs: 2.21.5 on ranks 8-15 (node b), 2.27.3"),
        ({"script_digest": "cd" * 32}, "fail", "the script file differs: sha256 cdcdcdcdcdcd on ranks 8-15 (node b)"),
        ({"versions": {**VERSIONS, "cuda": "12.4"}}, "warn", "CUDA differs: 12.4 on ranks 8-15 (node b), 12.8 on"),
        ({"versions": {**VERSIONS, "python": "3.10.2"}}, "warn", "Python differs: 3.10 on ranks 8-15 (node b), 3.11"),
        ({"versions": {**VERSIONS, "gpuwatch": "0.0.9"}}, "warn", "gpuwatch differs: 0.0.9 on ranks 8-15 (node b)"),
        ({"driver": "535.104.05"}, "warn", "the driver differs: 535.104.05 on ranks 8-15 (node b), 550.54.15 on"),
        ({"device_name": "NVIDIA A100"}, "warn", "the GPU's type differs: NVIDIA A100 on ranks 8-15 (node b)"),
    ],
)
def test_the_odd_node_comes_first_with_both_values_and_hosts(changes, grade, start):
    one = only(compare(changed(job(24), range(8, 16), **changes)))

    assert one.sentence.startswith(start)
    assert (one.stage, one.grade, one.subject) == ("consistency", grade, "node")
    assert (one.ranks, one.hosts) == ([*range(8, 16)], ["b"])
    assert one.next.endswith("; look at b first.")
    assert not one.sentence.endswith(".")


def test_a_patch_release_of_python_is_no_difference():
    assert compare(with_version(job(), [3], python="3.11.9")) == []


def test_one_rank_of_a_node_is_not_its_node():
    one = only(compare(with_version(job(), [3], torch="2.12.1")))
    assert (one.subject, one.ranks, one.hosts) == ("rank", [3], ["a"])
    assert one.sentence.startswith("torch differs: 2.12.1 on rank 3 (node a), 2.13.0 on ranks 0-2, 4-15 (nodes a, b)")


def test_of_two_equal_sides_none_is_the_odd_one():
    one = only(compare(with_version(job(), range(8, 16), torch="2.12.1")))
    assert (one.subject, one.ranks, one.hosts) == ("job", [*range(8, 16), *range(8)], ["b", "a"])
    assert "look at" not in one.next
    assert one.sentence.startswith("torch differs: 2.12.1 on ranks 8-15 (node b), 2.13.0 on ranks 0-7 (node a)")


def test_many_values_are_counted():
    facts = job(24, per_node=2)
    for rank in range(12, 24):
        facts = with_version(facts, [rank], torch=f"2.9.{rank}")
    one = only(compare(facts))
    assert "2.13.0 on ranks 0-11 (6 nodes: a, b, c, ...), and 9 other values; " in one.sentence


def test_ranks_of_which_the_version_is_not_known_are_left_out():
    assert compare(changed(job(), [3], versions={}, driver="", script_digest="")) == []


def test_what_stops_the_job_comes_first():
    facts = changed(job(), [3], driver="1")
    facts = changed(facts, [9], uuid=facts[8].uuid)
    assert [one.grade for one in compare(facts)] == ["fail", "warn"]


def test_every_comparison_says_why_and_what_next():
    assert all(compared.why and compared.next for compared in COMPARED)


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "here", "there", "grade"),
    [
        ("NCCL_ALGO", "Ring", None, "fail"),
        ("NCCL_PROTO", "LL", "Simple", "fail"),
        ("NCCL_NET", "Socket", "IB", "fail"),
        ("NCCL_IB_DISABLE", "1", None, "fail"),
        ("NCCL_BUFFSIZE", "1048576", None, "fail"),
        ("NCCL_SOCKET_FAMILY", "AF_INET6", "AF_INET", "fail"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "OFF", "fail"),
        ("GLOO_DEVICE_TRANSPORT", "TCP_TLS", None, "fail"),
        ("NCCL_CROSS_NIC", "1", "0", "warn"),
        ("NCCL_SOMETHING_NEW", "1", None, "warn"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "0", "warn"),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1", None, "warn"),
    ],
)
def test_settings_that_should_agree(setting, here, there, grade):
    facts = with_setting(job(24), range(24), **({setting: there} if there else {}))
    one = only(compare(with_setting(facts, range(8, 16), **{setting: here})))

    others = there or "not set"
    assert one.sentence.startswith(
        f"{setting} differs: {here} on ranks 8-15 (node b), {others} on ranks 0-7, 16-23 (nodes a, c)"
    )
    assert (one.grade, one.subject) == (grade, "node")
    assert setting in one.next


@pytest.mark.parametrize(
    ("setting", "here", "there"),
    [
        ("NCCL_IB_DISABLE", "0", None),
        ("NCCL_ALGO", "Ring", "RING"),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO", "OFF"),
        ("NCCL_SOCKET_IFNAME", "eth0", None),
        ("NCCL_DEBUG_FILE", "/tmp/a", "/tmp/b"),
        ("NCCL_DEBUG", "INFO", "WARN"),
        ("NCCL_IB_HCA", "mlx5_0", "mlx5_4"),
        ("NCCL_TOPO_FILE", "/etc/a.xml", "/etc/b.xml"),
        ("TORCH_HOME", "/a", "/b"),
        ("NCCL_OWN_LOCAL_THING", "1", "2"),
        ("GLOO_SOCKET_IFNAME", "eth0", None),
        ("CUDA_VISIBLE_DEVICES", "0", "1"),
    ],
)
def test_settings_that_may_differ(setting, here, there):
    facts = with_setting(job(), range(16), **({setting: there} if there else {}))
    assert compare(with_setting(facts, range(8, 16), **{setting: here})) == []


def test_the_way_between_two_gpus_of_a_node_must_be_chosen_alike_on_both():
    inside = only(compare(with_setting(with_setting(job(), range(16)), [3], NCCL_P2P_DISABLE="1")))
    between = only(compare(with_setting(with_setting(job(), range(16)), range(8, 16), NCCL_P2P_DISABLE="1")))
    assert (inside.grade, between.grade) == ("fail", "warn")


def test_each_policy_has_a_reason():
    names = ["NCCL_ALGO", "NCCL_P2P_LEVEL", "NCCL_ANY", "TORCH_ANY"]
    assert all(policy is not None and policy.why for policy in map(policy_of, names))


# -- GPUs ------------------------------------------------------------------------------------------------------------


def test_two_ranks_on_one_gpu():
    facts = changed(job(), [1], uuid="GPU-0-0", pci_bus="0000:00:00.0")
    one = only(compare(facts))

    assert one.sentence == (
        "ranks 0, 1 (node a) share one GPU, GPU-0-0 (NVIDIA H100, 0000:00:00.0); NCCL refuses it, or hangs on it"
    )
    assert (one.grade, one.subject, one.ranks, one.hosts, one.device) == ("fail", "gpu", [0, 1], ["a"], "GPU-0-0")
    assert "--nproc-per-node" in one.next
    assert "set_device" in one.next


def test_the_same_uuid_on_another_machine_is_another_gpu():
    assert compare(changed(job(), [8], uuid="GPU-0-0")) == []


def test_parts_of_one_gpu_are_not_shared():
    facts = {rank: replace(known, pci_bus="0000:00:00.0", uuid=f"MIG-{rank}") for rank, known in job(4).items()}
    assert compare(facts) == []
    assert only(compare(changed(facts, [3], uuid="MIG-1"))).device == "MIG-1"


def test_two_launches_on_one_host():
    facts = changed(job(2, per_node=1), [1], uuid="GPU-0-0", boot_id="boot-0", host="a")
    assert "Two launches run on a" in only(compare(facts)).next


def test_visible_devices_that_name_a_gpu_twice():
    facts = {rank: replace(known, environment={"CUDA_VISIBLE_DEVICES": "2"}) for rank, known in job(2).items()}
    assert "CUDA_VISIBLE_DEVICES=2" in only(compare(changed(facts, [1], uuid="GPU-0-0"))).next


def test_a_local_rank_that_is_always_0():
    assert "--virtual-local-rank" in only(compare(changed(job(2), [1], uuid="GPU-0-0", local_rank=0))).next


def test_all_gpus_of_a_host_shared_is_one_finding():
    facts = {rank: replace(known, uuid=f"GPU-{known.node}-{known.local_rank // 2}") for rank, known in job(16).items()}
    found = compare(facts)
    assert [one.hosts for one in found] == [["a"], ["b"]]
    assert all("and 3 more GPUs of this host are shared, too" in one.sentence for one in found)
    assert found[1].ranks == list(range(8, 16))


@pytest.mark.parametrize(
    ("nccl", "asked", "grade"), [("2.30.1", "1", "warn"), ("2.29.9", "1", "fail"), ("2.30.1", "0", "fail")]
)
def test_a_shared_gpu_may_be_meant_from_nccl_2_30_on(nccl, asked, grade):
    facts = with_version(changed(job(2), [1], uuid="GPU-0-0"), range(2), nccl=nccl)
    assert only(compare(with_setting(facts, range(2), NCCL_MULTI_RANK_GPU_ENABLE=asked))).grade == grade


def no_gpu(facts, ranks, visible, error=""):
    return changed(
        facts, ranks, device="cpu", device_name="", uuid="", pci_bus="", gpus_visible=visible, device_error=error
    )


def test_a_node_whose_gpus_are_gone():
    one = only(compare(no_gpu(job(), range(8, 16), 0, "CUDA unknown error")))
    assert (one.grade, one.subject, one.hosts) == ("fail", "node", ["b"])
    assert one.sentence == "ranks 8-15 (node b) have no GPU (CUDA unknown error), ranks 0-7 (node a) have one"


def test_more_ranks_than_gpus():
    one = only(compare(no_gpu(job(), [6, 7], 6)))
    assert (one.grade, one.ranks) == ("warn", [6, 7])
    assert one.sentence.startswith("ranks 6, 7 (node a) have no GPU of their own: the local rank is beyond the 6")
    assert "--nproc-per-node 6" in one.next


def test_a_job_without_any_gpu_is_as_it_should_be():
    assert compare(no_gpu(job(), range(16), 0, "no NVIDIA driver")) == []


def test_a_gpu_that_could_not_be_looked_at_stops_a_job_that_has_gpus():
    one = only(compare(no_gpu(job(), [5], None, "hung for 20 s")))
    assert (one.grade, one.subject, one.ranks) == ("fail", "rank", [5])
    assert one.sentence == ("rank 5 (node a) cannot use its GPU (hung for 20 s), ranks 0-4, 6-15 (nodes a, b) can")
    assert compare(no_gpu(job(), range(16), None, "hung for 20 s")) == []


# -- limits and networks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shm_free": 64 << 20}, "ranks 8-15 (node b) have only 64 MiB of /dev/shm free"),
        ({"limits": {"nofile": 256, "memlock": -1}}, "ranks 8-15 (node b) have a limit of 256 open files"),
        (
            {"limits": {"nofile": -1, "memlock": 64 << 10}, "rdma_devices": ["mlx5_0"]},
            "ranks 8-15 (node b) have a limit of 64 KiB on locked memory",
        ),
    ],
)
def test_low_limits_are_warned_of(changes, words):
    one = only(compare(changed(job(), range(8, 16), **changes)))
    assert (one.grade, one.subject, one.hosts) == ("warn", "node", ["b"])
    assert words in one.sentence
    assert one.next


@pytest.mark.parametrize(
    "changes",
    [
        {"limits": {"memlock": 64 << 10}},  # no adapter that would need it
        {"limits": {"memlock": 64 << 10}, "rdma_devices": ["mlx5_0"], "environment": {"NCCL_IB_DISABLE": "1"}},
        {"limits": {"memlock": -1, "nofile": -1}, "rdma_devices": ["mlx5_0"]},
        {"limits": {}, "shm_free": None, "rdma_devices": ["mlx5_0"]},
    ],
)
def test_limits_that_do_no_harm(changes):
    assert compare(changed(job(), range(16), **changes)) == []


def test_locked_memory_matters_only_between_nodes():
    assert compare(changed(job(8), range(8), limits={"memlock": 64 << 10}, rdma_devices=["mlx5_0"])) == []


def test_more_ranks_need_more_files():
    assert compare(changed(job(16), range(16), limits={"nofile": 1024})) == []
    assert "open files" in only(compare(changed(job(64), range(64), limits={"nofile": 1024}))).sentence


def on_networks(*addresses):
    """One rank per node, and its addresses."""
    facts = job(len(addresses), per_node=1)
    return {rank: replace(known, interfaces={"eth0": list(addresses[rank])}) for rank, known in facts.items()}


def test_a_node_on_another_network():
    one = only(compare(on_networks(["10.0.0.1/24"], ["192.168.7.4/24"], ["10.0.0.3/24"])))
    assert (one.grade, one.subject, one.hosts) == ("warn", "node", ["b"])
    assert one.sentence == "rank 1 (node b) has no address in 10.0.0.0/24, where ranks 0, 2 (nodes a, c) have one"
    assert "SOCKET_IFNAME" in one.next


def test_no_two_nodes_on_one_network():
    one = only(compare(on_networks(["10.0.1.1/24"], ["10.0.2.1/24"])))
    assert (one.grade, one.subject) == ("warn", "job")


@pytest.mark.parametrize(
    "addresses",
    [
        ([["10.0.0.1/24", "172.17.0.1/16"], ["10.0.0.2/24", "172.17.0.1/16"]]),
        ([["10.1.0.1/24", "10.0.0.1/24"], ["10.2.0.1/24", "10.0.0.2/24"]]),
        ([["fd00::1/64"], ["fd00::2/64"]]),
        ([["10.0.0.1/32"], ["10.0.0.2/32"]]),  # each address for itself, as in GCP: packets are routed
        ([["10.0.0.1/24"], []]),
    ],
)
def test_nodes_that_can_meet(addresses):
    assert compare(on_networks(*addresses)) == []


def test_docker_joins_no_two_machines():
    facts = on_networks(["10.0.1.1/24", "172.17.0.1/16"], ["10.0.2.1/24", "172.17.0.1/16"])
    assert "no two of the 2 nodes" in only(compare(facts)).sentence


def test_two_launches_on_one_machine_have_the_same_addresses():
    facts = on_networks(["10.0.1.1/24"], ["10.0.1.1/24"])
    assert compare({rank: replace(known, boot_id="one") for rank, known in facts.items()}) == []


def test_a_setting_that_names_no_interface():
    facts = with_setting(job(), range(16), NCCL_SOCKET_IFNAME="ens")
    one = only(compare(facts))
    assert one.grade == "fail"
    assert one.sentence == ("NCCL_SOCKET_IFNAME=ens names no interface of ranks 0-15 (nodes a, b); there are: eth0, lo")
    assert only(compare(with_setting(job(), range(16), GLOO_SOCKET_IFNAME="ens"))).grade == "warn"


@pytest.mark.parametrize(
    ("setting", "name", "matches"),
    [
        ("eth", "eth1", True),
        ("eth,ib", "ib0", True),
        ("=eth0", "eth0", True),
        ("=eth0", "eth01", False),
        ("^docker", "eth0", True),
        ("^docker,eth", "eth0", False),
        ("^=docker0", "docker01", True),
        ("ens", "eth0", False),
    ],
)
def test_nccls_way_to_name_interfaces(setting, name, matches):
    assert nccl_matches(setting, name) is matches


def test_gloos_way_to_name_interfaces():
    assert gloo_matches("eth0,eth1", "eth1")
    assert not gloo_matches("eth", "eth1")


# -- for any job -----------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.integers(0, 600), st.sampled_from("abcd"), min_size=1))
def test_sides_hold_every_rank_once_and_the_largest_is_last(values):
    sides = sides_of(values)
    assert sorted(rank for side in sides for rank in side.ranks) == sorted(values)
    assert all(values[rank] == side.value for side in sides for rank in side.ranks)
    assert len({side.value for side in sides}) == len(sides)
    assert max(len(side.ranks) for side in sides) == len(sides[-1].ranks)
    odd = odd_ranks(sides)
    assert len(odd) < len(values)
    if odd:
        assert not set(odd) & set(sides[-1].ranks)


settings = st.dictionaries(
    st.sampled_from(["NCCL_ALGO", "NCCL_DEBUG", "NCCL_NEW", "TORCH_X", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE"]),
    st.sampled_from(["", "0", "1", "Ring"]),
)
any_facts = st.builds(
    InventoryFacts,
    host=st.sampled_from(["", "a", "b"]),
    node=st.integers(0, 2),
    boot_id=st.sampled_from(["", "x", "y"]),
    device=st.sampled_from(["", "cpu", "cuda:0"]),
    uuid=st.sampled_from(["", "GPU-1", "GPU-2"]),
    versions=st.dictionaries(st.sampled_from(list(VERSIONS)), st.sampled_from(["", "1", "2.30", "?"])),
    environment=settings,
    interfaces=st.dictionaries(
        st.sampled_from(["lo", "eth0"]), st.lists(st.sampled_from(["127.0.0.1/8", "10.0.0.1/24", "fd00::1/64"]))
    ),
    shm_free=st.none() | st.integers(0, 1 << 40),
    limits=st.dictionaries(st.sampled_from(["nofile", "memlock"]), st.integers(-1, 1 << 40)),
    gpus_visible=st.none() | st.integers(0, 2),
    rdma_devices=st.sampled_from([[], ["mlx5_0"]]),
)


@pytest.mark.slow
@given(st.dictionaries(st.integers(0, 40), any_facts), st.randoms())
def test_any_inventories_in_any_order_give_the_same_findings(facts, random):
    found = compare(facts)
    shuffled = list(facts.items())
    random.shuffle(shuffled)
    assert compare(dict(shuffled)) == found
    for one in found:
        assert set(one.ranks) <= set(facts)
        assert one.ranks
        assert len(one.ranks) == len(set(one.ranks))
        assert set(one.hosts) == {facts[rank].host for rank in one.ranks} - {""}


def test_four_times_the_ranks_take_four_times_the_work():
    def calls(world_size):
        facts = {
            rank: replace(known, environment={"NCCL_ALGO": str(rank % 3), "NCCL_NEW": str(rank)}, driver=str(rank))
            for rank, known in job(world_size).items()
        }
        counted = 0

        def count(frame, event, argument):
            nonlocal counted
            counted += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            assert compare(facts)
        finally:
            sys.setprofile(None)
        return counted

    assert calls(2048) < calls(512) * 5  # in quadratic time it would be 16
