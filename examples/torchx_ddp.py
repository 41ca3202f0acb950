"""torchx's `dist.ddp` with gpuwatch in torchrun's place:

torchx run -s SCHEDULER examples/torchx_ddp.py:ddp --nnodes 2 --gpu 8 --image IMAGE --script train.py -- --lr 1e-4
"""

import shlex

import torchx.specs as specs


def ddp(
    *script_args: str, script: str, image: str = "", nnodes: int = 1, nproc_per_node: int = 0, gpu: int = 0
) -> specs.AppDef:
    """One launch on each node.

    Args:
        script_args: arguments of the script
        script: the script to train with
        image: what the nodes run, with gpuwatch-cluster installed
        nnodes: how many nodes
        nproc_per_node: ranks on each node (as many as GPUs)
        gpu: GPUs of each node
    """
    # The name of the variable in which the scheduler puts the first node is torchx's to fill in; bash reads it.
    options = [
        f"--nnodes {nnodes} --nproc-per-node {nproc_per_node or gpu or 1}",
        f"--rdzv-backend c10d --rdzv-endpoint $${specs.macros.rank0_env}:29400 --rdzv-id {specs.macros.app_id}",
    ]
    node = specs.Role(
        name="node",
        image=image,
        entrypoint="bash",
        args=["-c", " ".join(["exec gpuwatch launch", *options, shlex.join([script, *script_args])])],
        num_replicas=nnodes,
        resource=specs.resource(gpu=gpu),
        port_map={"c10d": 29400, "gpuwatch": 29401},
    )
    return specs.AppDef(name="train", roles=[node])
