"""The inventory of this very machine, and of what is missing on it."""

import hashlib
import os
import resource
import socket
import subprocess
import sys
from types import SimpleNamespace

import msgspec
import pytest
import torch
from gpuwatch.core.identity import RankIdentity
from gpuwatch.core.preflight import InventoryFacts
from gpuwatch.worker.preflight import inventory
from gpuwatch.worker.preflight.inventory import gather_device

IDENTITY = RankIdentity(9, 1, 16, 8, "head", 29500, True)


def test_this_machine_is_described(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('hello')\n")
    environ = {"GROUP_RANK": "1", "NCCL_DEBUG": "INFO", "TORCH_LOGS": "dynamo", "PATH": "/bin", "HOME": str(tmp_path)}

    facts = inventory.gather(IDENTITY, str(script), environ)

    assert (facts.host, facts.node, facts.local_rank) == (socket.gethostname(), 1, 1)
    assert len(facts.boot_id) == 36
    assert facts.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts.versions["torch"].startswith("2.")
    assert facts.environment == {"NCCL_DEBUG": "INFO", "TORCH_LOGS": "dynamo"}
    assert "127.0.0.1/8" in facts.interfaces["lo"]
    assert facts.memory_free > 1 << 20
    assert facts.shm_free is not None
    assert facts.limits["nofile"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert facts.script_digest == hashlib.sha256(script.read_bytes()).hexdigest()
    assert msgspec.json.decode(msgspec.json.encode(facts), type=InventoryFacts) == facts


def test_what_cannot_be_had_is_unknown(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("not on this machine")

    for module, name in [("psutil", "net_if_addrs"), ("psutil", "virtual_memory"), ("os", "statvfs")]:
        monkeypatch.setattr(f"{module}.{name}", broken)
    monkeypatch.setattr(inventory, "host_name", broken)
    monkeypatch.setattr(resource, "getrlimit", broken)

    facts = inventory.gather(IDENTITY, str(tmp_path / "gone.py"), {})

    assert (facts.host, facts.node, facts.interfaces, facts.memory_free, facts.shm_free) == ("", 0, {}, None, None)
    assert "nofile" not in facts.limits
    assert facts.script_digest == ""


def test_a_script_that_is_a_pipe_is_left_for_python_to_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert inventory.gather(IDENTITY, str(tmp_path / "pipe"), {}).script_digest == ""


def test_nccls_own_files_count_and_the_environment_wins(tmp_path):
    (tmp_path / "nccl.conf").write_text(
        "# all nodes\nNCCL_ALGO=Ring\nNCCL_IB_HCA==mlx5_0\nNCCL_ALGO=Tree\nPATH=/evil\n"
    )

    found = inventory.settings({"NCCL_CONF_FILE": str(tmp_path / "nccl.conf"), "NCCL_IB_HCA": "mlx5_1"})

    assert (found["NCCL_ALGO"], found["NCCL_IB_HCA"]) == ("Ring", "mlx5_1")
    assert "PATH" not in found
    (tmp_path / "nccl.conf").rename(tmp_path / ".nccl.conf")
    assert inventory.settings({"HOME": str(tmp_path)})["NCCL_ALGO"] == "Ring"


@pytest.mark.slow
def test_the_limits_are_those_of_the_process():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (333, 333))\n"
        "from gpuwatch.core.identity import RankIdentity; from gpuwatch.worker.preflight.inventory import gather\n"
        "print(gather(RankIdentity(0, 0, 1, 1, '', 0, True)).limits['nofile'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "333", done.stderr


def test_looking_does_not_initialise_cuda():
    import torch

    inventory.gather(IDENTITY)
    assert not torch.cuda.is_initialized()


def test_the_device_completes_the_inventory(monkeypatch):
    facts = InventoryFacts(host="a", device="", driver="", versions={"torch": "2.13.0"})
    gpu = SimpleNamespace(name="H100", uuid="1")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda ordinal: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda ordinal: (10, 20))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda ordinal: gpu)
    monkeypatch.setattr(inventory, "_driver", lambda: "550.54")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))

    whole = gather_device(facts, 3)

    assert (whole.device, whole.uuid, whole.driver, whole.gpus_visible) == ("cuda:3", "GPU-1", "550.54", 8)
    assert whole.versions == {"torch": "2.13.0", "nccl": "2.27.3"}
    assert (whole.device_memory_free, whole.device_memory_total) == (10, 20)


def test_without_a_gpu_the_reason_is_told():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    found = gather_device(InventoryFacts(device=""), 0)
    assert (found.device, found.gpus_visible) == ("cpu", 0)
    assert found.device_error


@pytest.mark.gpu
def test_a_gpu_is_described_as_nvml_knows_it():
    import pynvml

    code = (
        "import msgspec; from gpuwatch.worker.preflight.inventory import InventoryFacts, gather_device\n"
        "print(msgspec.json.encode(gather_device(InventoryFacts(), 0)).decode())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = msgspec.json.decode(done.stdout.splitlines()[-1], type=InventoryFacts)

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(found.uuid)
        bus = pynvml.nvmlDeviceGetPciInfo(handle).busId
        name = pynvml.nvmlDeviceGetName(handle)
        driver = pynvml.nvmlSystemGetDriverVersion()
    finally:
        pynvml.nvmlShutdown()
    bus = bus.decode() if isinstance(bus, bytes) else bus
    assert (found.device, found.device_name, found.driver) == ("cuda:0", name, driver)
    assert bus.lower().endswith(found.pci_bus)
    assert 0 < found.device_memory_free <= found.device_memory_total
    assert found.versions["nccl"].startswith("2.")


@pytest.mark.gpu
def test_the_drivers_uuid_is_torchs_for_a_whole_gpu():
    code = (
        "import torch; torch.cuda.init(); from gpuwatch.worker.device import accelerator as d\n"
        "print(d.CudaAccelerator().uuid(0) == 'GPU-' + d.driver_uuid(0), ' MIG ' in torch.cuda.get_device_name(0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() in (["True", "False"], ["False", "True"]), done.stderr


@pytest.mark.gpu
def test_a_rank_beyond_the_gpus_has_none():
    code = (
        "from gpuwatch.worker.preflight.inventory import InventoryFacts, gather_device\n"
        "found = gather_device(InventoryFacts(), 99); print(found.device, found.gpus_visible > 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["cpu", "True"], done.stderr


def test_a_secret_among_the_settings_is_unknown_to_others(tmp_path):
    (tmp_path / ".nccl.conf").write_text("NCCL_PLUGIN_TOKEN=hunter2\nNCCL_IB_PKEY=3\n")
    environ = {"HOME": str(tmp_path), "TORCH_HUB_TOKEN": "hunter2", "NCCL_PROXY": "http://me:hunter2@host:80"}

    assert inventory.settings(environ) == {
        "NCCL_IB_PKEY": "3",
        "NCCL_PLUGIN_TOKEN": "***",
        "NCCL_PROXY": "http://***@host:80",
        "TORCH_HUB_TOKEN": "***",
    }
