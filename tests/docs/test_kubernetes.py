"""The manifest in docs/kubernetes: JobSet takes it, and gpuwatch makes of it what it says."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from gpuwatch.launcher.fill_in import fill_in, given_options, read_job
from gpuwatch.launcher.options import get_parser

ROOT = Path(__file__).parents[2]
MANIFEST = yaml.safe_load((ROOT / "docs" / "kubernetes" / "jobset.yaml").read_text())
SCHEMA = json.loads((ROOT / "tests" / "data" / "kubernetes" / "jobset-v1alpha2.json").read_text())


def strict(schema):
    """With fields that the schema does not know refused, as `kubectl apply` refuses them."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(part) for key, part in schema.items()}
    if "properties" in made and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


VALIDATOR = jsonschema.Draft202012Validator(strict(SCHEMA))


def test_jobset_takes_the_manifest():
    assert [error.message for error in VALIDATOR.iter_errors(MANIFEST)] == []


def job_of(manifest):
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]


def pod_of(manifest):
    return job_of(manifest)["template"]["spec"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda manifest: manifest["spec"].update(failurePolicies={}),
        lambda manifest: job_of(manifest).update(completions="two"),
        lambda manifest: pod_of(manifest)["containers"][0].pop("name"),
        lambda manifest: pod_of(manifest)["containers"][0]["env"][0].update(valeu="2"),
        lambda manifest: pod_of(manifest)["containers"][0]["command"].append(2),
        lambda manifest: pod_of(manifest)["volumes"][1].update(emptyDirectory={}),
    ],
)
def test_the_schema_knows_a_mistake(spoil):
    spoiled = copy.deepcopy(MANIFEST)
    spoil(spoiled)
    assert not VALIDATOR.is_valid(spoiled)


def environment(index: int) -> dict[str, str]:
    """What the pod of this index sees; what Kubernetes fills in is filled in here."""
    from_pod = {
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
        "metadata.labels['jobset.sigs.k8s.io/jobset-uid']": "7c9d",
    }
    found = {}
    for variable in pod_of(MANIFEST)["containers"][0]["env"]:
        source = variable.get("valueFrom", {})
        found[variable["name"]] = (
            from_pod[source["fieldRef"]["fieldPath"]] if "fieldRef" in source else variable.get("value", "a secret")
        )
    return found


@pytest.mark.parametrize("index", [0, 1])
def test_each_pod_is_a_node_of_one_job(index, monkeypatch):
    environ = environment(index)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    command = pod_of(MANIFEST)["containers"][0]["command"]
    assert command[:2] == ["gpuwatch", "launch"]
    args = get_parser().parse_args(command[2:])
    assert fill_in(args, given_options(get_parser(), command[2:], environ), read_job(environ), lambda: 0)

    name, group = MANIFEST["metadata"]["name"], MANIFEST["spec"]["replicatedJobs"][0]["name"]
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("c10d", f"{name}-{group}-0-0.{name}:29400")
    assert (args.rdzv_id, args.rdzv_conf) == ("7c9d", f"is_host={int(index == 0)}")
    assert int(args.nnodes) == job_of(MANIFEST)["parallelism"] == job_of(MANIFEST)["completions"]
    limits = pod_of(MANIFEST)["containers"][0]["resources"]["limits"]
    assert int(args.nproc_per_node) == limits["nvidia.com/gpu"]
    assert (args.training_script, args.training_script_args) == ("train.py", ["--lr", "1e-4"])


def test_the_report_and_the_recorders_have_a_place():
    pod = pod_of(MANIFEST)
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    command = pod["containers"][0]["command"]
    assert command[command.index("--runs-dir") + 1] in mounts
    assert "/dev/shm" in mounts
    assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
