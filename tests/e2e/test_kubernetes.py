"""The manifests of launch/kubernetes, against schemas; and what runs in their pods, as processes here."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fastload
from tests.dist.patience import patient
from tests.e2e.forked import forking_python

_ROOT = Path(__file__).resolve().parents[2]
_FOLDER = _ROOT / "launch" / "kubernetes"
_VERSION = "1.37"

pytestmark = pytest.mark.timeout(150)


def manifests(name: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return [each for each in yaml.safe_load_all((_FOLDER / name).read_text()) if each is not None]


def require_core(kind: str, api_version: str, spec: Any) -> None:
    """Validates the specification of a core object, unknown fields included."""
    validate = pytest.importorskip("kubernetes_validate").validate
    document = {"apiVersion": api_version, "kind": kind, "metadata": {"name": "any"}, "spec": spec}
    validate(json.loads(json.dumps(document)), _VERSION, strict=True)


def require_model(name: str, document: dict[str, Any]) -> None:
    """Parses a document by a model of kubeflow-trainer-api, which leaves out fields that it does not know."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    assert getattr(models, name).from_dict(document).to_dict() == document


def test_the_jobset() -> None:
    [jobset] = manifests("jobset.yaml")
    require_model("JobsetV1alpha2JobSet", jobset)
    [node] = jobset["spec"]["replicatedJobs"]
    job = node["template"]["spec"]
    require_core("Job", "batch/v1", job)
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    name = jobset["metadata"]["name"]
    assert env["HOST"] == f"{name}-{node['name']}-0-0.{name}"
    assert int(env["NODES"]) == job["completions"] == job["parallelism"]
    assert int(env["RANKS_PER_NODE"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert env["CHECKPOINTS"] in container["args"]
    assert pod["terminationGracePeriodSeconds"] > int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) > 30
    [mount], [volume] = container["volumeMounts"], pod["volumes"]
    assert mount == {"name": volume["name"], "mountPath": env["MEMORY"]}
    assert volume["emptyDir"]["medium"] == "Memory"
    assert_policy(job, container["name"])


def assert_policy(job: dict[str, Any], container: str) -> None:
    """Asserts that what `pod.sh` ends with is neither a failure nor the end of the job."""
    assert job["template"]["spec"]["restartPolicy"] == "Never", "a podFailurePolicy needs it"
    codes = {
        rule["action"]: rule["onExitCodes"]
        for rule in job["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    stopped = [
        int(code) for code in re.findall(r"^ +exit (\d+)$", (_FOLDER / "pod.sh").read_text(), re.MULTILINE)
    ]
    assert codes["Ignore"] == {"containerName": container, "operator": "In", "values": stopped}
    assert codes["FailJob"] == {"containerName": container, "operator": "NotIn", "values": stopped}


def test_the_trainjob() -> None:
    runtime, job = manifests("trainjob.yaml")
    require_model("TrainerV1alpha1TrainingRuntime", runtime)
    require_model("TrainerV1alpha1TrainJob", job)
    [node] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    require_core("Job", "batch/v1", node["template"]["spec"])
    assert_policy(node["template"]["spec"], "node")
    assert job["spec"]["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    [patch] = job["spec"]["runtimePatches"]
    [patched] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert patched["name"] == node["name"]
    [jobset] = manifests("jobset.yaml")
    [container] = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    assert job["spec"]["trainer"]["env"] == container["env"], "the same training"
    assert (job["spec"]["trainer"]["command"], job["spec"]["trainer"]["args"]) == (
        container["command"],
        container["args"],
    )


def test_the_pods_of_the_leaderworkerset() -> None:
    [servers] = manifests("leaderworkerset.yaml")
    pod = servers["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    require_core("Pod", "v1", pod)
    [stage], [serve] = pod["initContainers"], pod["containers"]
    destination = stage["args"][0].split()[-1]
    assert destination in serve["command"]
    for container in (stage, serve):
        assert destination.startswith(container["volumeMounts"][0]["mountPath"] + "/")


def test_the_access_to_storage() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    documents = manifests("storage-access.yaml")
    assert [document["kind"] for document in documents] == ["ServiceAccount"] * 3 + ["PersistentVolumeClaim"]
    for document in documents:
        validate(document, _VERSION, strict=True)


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Pods:
    """Two pods of a training, each a process with a memory of its own."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        root = str(folder / "root")
        words = ["launch/train.py", "--root", root, "--width", "32", "--batch", "16", "--log-every", "1"]
        site = {
            "HOST": "127.0.0.1",
            "PORT": str(port),
            "NODES": "2",
            "RANKS_PER_NODE": "1",
            "LOCAL_ADDR": "127.0.0.1",
        }
        site |= {"CHECKPOINTS": root, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "MAX_RESTARTS": "0"}
        site |= {"PYTHONPATH": str(_ROOT), "PYTHON_EXEC": forking_python()}  # the ranks start in no time
        site["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.root = Path(root)
        self._output = folder / "output"
        self.processes = []
        for index in range(2):
            own = {"JOB_COMPLETION_INDEX": str(index), "STOPPED": str(folder / f"stopped{index}")}
            own["MEMORY"] = str(folder / f"memory{index}")
            Path(own["MEMORY"]).mkdir(exist_ok=True)
            with self._output.open("a") as output:
                self.processes.append(
                    subprocess.Popen(
                        [str(_FOLDER / "pod.sh"), *words, *arguments],
                        env=os.environ | site | own | environment,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def output(self) -> str:
        return self._output.read_text()

    def until(self, text: str) -> None:
        deadline = time.monotonic() + patient(60)
        while not re.search(text, self.output()):
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def ranks(self) -> list[int]:
        """The processes of the ranks: children of torchrun, which is one of the pod's shell."""
        launchers = [launcher for pod in self.processes for launcher in children_of(pod.pid)]
        return [rank for launcher in launchers for rank in children_of(launcher)]

    def end(self) -> list[int]:
        return [process.wait(patient(60)) for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Pods]]:
    started: list[Pods] = []

    def start(*arguments: str, **environment: str) -> Pods:
        started.append(Pods(tmp_path, *arguments, **environment))
        return started[-1]

    yield start
    for pods in started:
        pods.close()


@pytest.mark.slow
def test_a_pod_that_is_told_to_stop_ends_both_with_everything_saved(start: Callable[..., Pods]) -> None:
    pods = start("--steps", "1000", "--pause", "0.05")
    pods.until("step 3: loss")
    pods.processes[1].send_signal(signal.SIGTERM)
    assert pods.end() == [75, 75], pods.output()
    assert pods.output().count("stopped, with everything saved") == 2
    [saved] = pods.root.glob("step_*/fastload.json")
    assert int(saved.parent.name.removeprefix("step_")) >= 3
    assert fastload.verify(saved.parent).num_blocks


@pytest.mark.slow
def test_pods_whose_program_fails_write_what_is_in_memory(start: Callable[..., Pods]) -> None:
    pods = start("--steps", "1000", "--pause", "0.05", "--memory-every", "2")
    pods.until("step 8: loss")
    for rank in pods.ranks():
        os.kill(rank, signal.SIGKILL)
    assert pods.end() == [1, 1], pods.output()
    [step] = re.findall(r"step (\d+) written from memory", pods.output())
    again = start("--steps", str(int(step) + 2))
    assert again.end() == [0, 0], again.output()
    assert f"begins at step {step} of" in again.output()
