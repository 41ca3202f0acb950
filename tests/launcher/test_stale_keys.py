"""What a process group leaves in a store that outlives it."""

import pytest
import torch.distributed as dist
from gpuwatch.launcher.elastic import purge_group_keys


@pytest.mark.skipif(not hasattr(dist.TCPStore, "list_keys"), reason="this torch cannot list a store's keys")
def test_keys_of_ended_groups_go_and_all_others_stay():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("torch.rendezvous.job", "state")
    dist.init_process_group("gloo", store=dist.PrefixStore("default_pg", server), rank=0, world_size=1)
    dist.barrier()
    dist.destroy_process_group()
    before = server.num_keys()

    assert purge_group_keys("127.0.0.1", server.port) >= 1
    assert not [key for key in server.list_keys() if "default_pg" in key]
    assert server.get("torch.rendezvous.job") == b"state"
    assert server.num_keys() < before
