"""`gradus render kubernetes`: the objects that run a config on Kubernetes.

A JobSet has one pod for the launcher and one for each node side. They share one claim, where the
run's folder lies, so a pod that comes back continues what the last one did.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

import gradus
from gradus.config import RunConfig, resolve_sources, variables_named_in
from gradus.config.check import contradictions
from gradus.config.problems import Problem
from gradus.errors import ConfigError, ExitCode
from gradus.heartbeat import ALIVE_VARIABLE
from gradus.plan.nodes import NodePlan, plan_nodes
from gradus.redact import without_any_secret
from gradus.run.lease import MARKER_NAME, POD_VARIABLE, STARTER_VARIABLE
from gradus.run.paths import RunDirectory

PROGRAM: Sequence[str] = ("gradus",)
"""What runs `gradus` in a pod."""
RUNS = "/runs"
CONTAINER = "gradus"
LAUNCHER, NODE = "launcher", "node"
_RESTARTS_JOBS_SINCE = (0, 12)
"""Version of JobSet that knows RestartJob."""
_SINCE = (0, 6)
"""Version of JobSet that knows rules of a failure policy."""
_CONFIG, _SECRETS, _ALIVE = "/config", "/secrets", "/tmp/alive"
_MOST_POD_FAILURES, _MOST_RESTARTS = 10, 3
_PRESTOP_SPARE_SECONDS = 5

_START_LAUNCHER = f"""\
for file in {_SECRETS}/*; do
  name=${{file##*/}}
  case $name in *[!A-Za-z0-9_]* | [0-9]*) continue ;; esac
  [ ! -f "$file" ] || export "$name=$(cat "$file")"
done
[ ! -e "$0/{MARKER_NAME}" ] || set -- "$@" --resume
exec "$@"
"""
"""Gets the run's folder and the command. A run that has begun continues."""
_START_NODE = 'exec "$@" --number "$((JOB_COMPLETION_INDEX + 1))"\n'
_IS_READY = """\
cd "$0"
for pair; do
  [ "${pair%%/*}" != "$JOB_COMPLETION_INDEX" ] || [ -e "${pair#*/}.json" ] || exit 1
done
"""
"""Gets the folder of ready files, and pairs of a pod's index and a process on it."""
_NODES = ("launch", "nodes")
_OBJECT = re.compile(r"[a-z]([a-z0-9-]{0,42}[a-z0-9])?")
"""Names of runs that names of pods, services and labels may begin with: JobSet adds 19 characters,
and a label has 63."""


def restarts_jobs(jobset_version: str | None) -> bool:
    """Whether a version of JobSet knows RestartJob; ConfigError for what is none, or too old."""
    if jobset_version is None:
        return False
    if not re.fullmatch(r"v?[0-9]+\.[0-9]+(\.[0-9]+)?", jobset_version):
        raise ConfigError(f'--jobset-version {jobset_version}: write it as "0.12" or "v0.12.0"')
    version = tuple(map(int, jobset_version.removeprefix("v").split(".")))
    if version < _SINCE:
        raise ConfigError(
            f"--jobset-version {jobset_version}: the objects need JobSet 0.6 at least; install a "
            "newer one in the cluster"
        )
    return version >= _RESTARTS_JOBS_SINCE


@dataclass(frozen=True)
class Manifest:
    """The objects of one run, whose config has none of the `pod_problems`."""

    config: RunConfig
    restarts_jobs: bool = False
    """Whether the cluster's JobSet knows RestartJob."""

    def text(self) -> str:
        """All of it as YAML."""
        name, namespace = self._name, self.config.kubernetes.namespace
        where = "" if namespace is None else f" --namespace {namespace}"
        claim = (
            ", also its claim with all that it saved"
            if self.config.kubernetes.claim is None
            else ""
        )
        told = {
            f"apply -f {name}.yaml": "starts it",
            f"logs -f job/{name}-{LAUNCHER}-0{where}": "shows its console",
            f"delete jobset {name}{where}": "ends it with a checkpoint; apply continues it",
            f"delete -f {name}.yaml": f"deletes its objects{claim}",
        }
        width = max(map(len, told))
        lines = [f"#   kubectl {words:<{width}}   {what}" for words, what in told.items()]
        head = "\n".join([f"# The run {name}, written by gradus {gradus.__version__}.", *lines])
        return (
            f"{head}\n{yaml.dump_all(self.objects(), Dumper=_Dumper, sort_keys=False, width=100)}"
        )

    def objects(self) -> list[dict[str, Any]]:
        return [
            it for it in (self._settings(), self._volume(), self._network(), self._jobs()) if it
        ]

    @property
    def _name(self) -> str:
        assert self.config.name is not None
        return self.config.name

    @property
    def _run_dir(self) -> RunDirectory:
        return RunDirectory(Path(RUNS) / self._name)

    @cached_property
    def _plan(self) -> NodePlan:
        plan = plan_nodes(self.config)
        assert plan is not None
        return plan

    def _object(self, api: str, kind: str, name: str, **rest: Any) -> dict[str, Any]:
        namespace = self.config.kubernetes.namespace
        where = {} if namespace is None else {"namespace": namespace}
        return {
            "apiVersion": api,
            "kind": kind,
            "metadata": {"name": name, **where, "labels": self._labels},
            **rest,
        }

    @property
    def _labels(self) -> dict[str, str]:
        return {"app.kubernetes.io/name": "gradus", "app.kubernetes.io/instance": self._name}

    # ------------------------------------------------------------------ what pods read

    @cached_property
    def _frozen(self) -> dict[str, Any]:
        """What the user wrote, as every start of the launcher finds it."""
        values = self.config.model_dump(mode="json", exclude_unset=True)
        return {**values, "name": self._name, "output_dir": RUNS}

    @property
    def _is_secret(self) -> bool:
        """Whether the config holds variables, or what looks like a key."""
        return bool(without_any_secret(self._frozen, {}) != self._frozen)

    def _settings(self) -> dict[str, Any]:
        content = {"run.json": json.dumps(self._frozen, indent=1, ensure_ascii=False) + "\n"}
        name = f"{self._name}-config"
        if self._is_secret:
            return self._object("v1", "Secret", name, type="Opaque", stringData=content)
        return self._object("v1", "ConfigMap", name, data=content)

    def _volume(self) -> dict[str, Any] | None:
        chosen = self.config.kubernetes
        if chosen.claim is not None:
            return None
        spec: dict[str, Any] = {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": f"{chosen.storage_gib}Gi"}},
        }
        if chosen.storage_class is not None:
            spec["storageClassName"] = chosen.storage_class
        return self._object("v1", "PersistentVolumeClaim", self._name, spec=spec)

    def _network(self) -> dict[str, Any]:
        """Only pods of the run reach its pods."""
        ours = {"matchLabels": self._labels}
        spec = {
            "podSelector": ours,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": ours}]}],
        }
        return self._object("networking.k8s.io/v1", "NetworkPolicy", self._name, spec=spec)

    # ------------------------------------------------------------------ pods

    def _jobs(self) -> dict[str, Any]:
        jobs = [self._job(LAUNCHER, 1)]
        rules = [_rule("refused", "FailJobSet", onJobFailureReasons=["PodFailurePolicy"])]
        if self._plan.number > 1:
            jobs.append(self._job(NODE, self._plan.number - 1))
            if self.restarts_jobs:
                rules.append(_rule("node_side", "RestartJob", targetReplicatedJobs=[NODE]))
        spec = {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [LAUNCHER]},
            "failurePolicy": {"maxRestarts": _MOST_RESTARTS, "rules": rules},
            "replicatedJobs": jobs,
        }
        return self._object("jobset.x-k8s.io/v1alpha2", "JobSet", self._name, spec=spec)

    def _job(self, role: str, count: int) -> dict[str, Any]:
        final = [int(ExitCode.CONFIG), int(ExitCode.CORRUPT_STATE)]
        rules: list[dict[str, Any]] = [
            {"action": "FailJob", "onExitCodes": _exit_codes(final)},
            {
                "action": "Ignore",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            },
            {
                "action": "Count" if role == LAUNCHER else "Ignore",
                "onExitCodes": _exit_codes([int(ExitCode.TRY_AGAIN)]),
            },
        ]
        spec = {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimit": _MOST_POD_FAILURES * count,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": rules},
            "template": self._pod(role),
        }
        return {"name": role, "replicas": 1, "template": {"spec": spec}}

    def _pod(self, role: str) -> dict[str, Any]:
        user, launch = self.config.kubernetes.user, self.config.launch
        grace = launch.warning_seconds + (0 if role == LAUNCHER else _PRESTOP_SPARE_SECONDS)
        spec = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": grace,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": user,
                "runAsGroup": user,
                "fsGroup": user,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [self._container(role)],
            "volumes": self._volumes(role),
        }
        return {"metadata": {"labels": self._labels}, "spec": spec}

    def _container(self, role: str) -> dict[str, Any]:
        run = str(self._run_dir.root)
        env: dict[str, Any] = {"HOME": "/tmp", "TMPDIR": "/tmp", ALIVE_VARIABLE: _ALIVE}
        env["HF_HOME"] = f"{RUNS}/.cache/huggingface"
        variables = [{"name": key, "value": value} for key, value in env.items()]
        uid = {"fieldRef": {"fieldPath": "metadata.uid"}}
        variables.append({"name": POD_VARIABLE, "valueFrom": uid})
        variables.append({"name": STARTER_VARIABLE, "value": f"the JobSet {self._name}"})
        resources = self._resources(role)
        words = [*PROGRAM, "rl", "@", f"{_CONFIG}/run.json"]
        command = ["sh", "-c", _START_LAUNCHER, run, *words]
        if role == NODE:
            command = ["sh", "-c", _START_NODE, NODE, *PROGRAM, NODE, run, "--stay"]
        container: dict[str, Any] = {
            "name": CONTAINER,
            "image": self.config.kubernetes.image,
            "command": command,
            "workingDir": RUNS,
            "env": variables,
            "resources": {"requests": resources, "limits": resources},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": self._mounts(role),
            **self._probes(role),
        }
        if role == NODE:
            # Where all pods are told to end at once, the launcher saves, and lets this one go.
            saving = math.ceil(self.config.launch.save_timeout_seconds) + _PRESTOP_SPARE_SECONDS
            container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(saving)]}}}
        return container

    def _resources(self, role: str) -> dict[str, str]:
        chosen = self.config.kubernetes
        found = {"cpu": str(chosen.cpus), "memory": f"{chosen.memory_gib}Gi"}
        if role == NODE or any(node == 0 for _, node in self._plan.gpus):
            found[chosen.gpu_resource] = str(self._plan.gpus_per_node)
        return {name: number for name, number in found.items() if number != "0"}

    def _mounts(self, role: str) -> list[dict[str, Any]]:
        places = {"runs": RUNS, "tmp": "/tmp", "shm": "/dev/shm"}
        mounts: list[dict[str, Any]] = [{"name": n, "mountPath": at} for n, at in places.items()]
        if role == LAUNCHER:
            read = {"config": _CONFIG}
            if self.config.kubernetes.secret is not None:
                read["secrets"] = _SECRETS
            mounts += [{"name": n, "mountPath": at, "readOnly": True} for n, at in read.items()]
        return mounts

    def _volumes(self, role: str) -> list[dict[str, Any]]:
        chosen = self.config.kubernetes
        half = f"{chosen.memory_gib * 512}Mi"
        volumes: list[dict[str, Any]] = [
            {"name": "runs", "persistentVolumeClaim": {"claimName": chosen.claim or self._name}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": half}},
        ]
        if role == LAUNCHER:
            name = f"{self._name}-config"
            kind = (
                {"secret": {"secretName": name}}
                if self._is_secret
                else {"configMap": {"name": name}}
            )
            volumes.append({"name": "config", **kind})
            if chosen.secret is not None:
                volumes.append({"name": "secrets", "secret": {"secretName": chosen.secret}})
        return volumes

    def _probes(self, role: str) -> dict[str, Any]:
        """A launcher and a node side touch a file as long as they watch their processes; the
        processes say when they can serve. What is silent among these, gradus itself ends."""
        launch = self.config.launch
        minutes = math.ceil((launch.hang_seconds + launch.ready_timeout_seconds) / 60)
        moved = ["sh", "-c", f'[ -n "$(find {_ALIVE} -mmin -{minutes})" ]']
        served = ["0/orchestrator"]
        if role == NODE:
            served = [f"{node - 1}/{name}" for name, node in self._plan.node_of.items() if node]
        ready = ["sh", "-c", _IS_READY, str(self._run_dir.ready), *served]
        return {
            "startupProbe": _probe(["test", "-e", _ALIVE], every=5, most=60),
            "livenessProbe": _probe(moved, every=60, most=3),
            "readinessProbe": _probe(ready, every=10, most=1),
        }


def _rule(name: str, action: str, **target: list[str]) -> dict[str, Any]:
    return {"name": name, "action": action, **target}


def _exit_codes(codes: list[int]) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": "In", "values": codes}


def _probe(command: list[str], *, every: int, most: int) -> dict[str, Any]:
    return {
        "exec": {"command": command},
        "periodSeconds": every,
        "timeoutSeconds": 10,
        "failureThreshold": most,
    }


class _Dumper(yaml.SafeDumper):
    """Programs and files as blocks, and nothing by reference."""

    def ignore_aliases(self, _: Any) -> bool:
        return True


def _block(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _block)


def pod_problems(config: RunConfig) -> list[Problem]:
    """What keeps a config from working on Kubernetes, as far as another machine can tell."""
    return [*contradictions(config, resolve_sources(config)), *_problems_there(config)]


def _problems_there(config: RunConfig) -> Iterator[Problem]:
    if config.kubernetes.image is None:
        text = "is missing; name the image whose containers have gradus"
        yield Problem(("kubernetes", "image"), text)
    if config.name is None or not _OBJECT.fullmatch(config.name):
        yield Problem(
            ("name",),
            f"{config.name!r} cannot name objects of Kubernetes; use at most 44 lower-case "
            "letters, digits or '-', and begin with a letter (--name)",
        )
    plan = plan_nodes(config)
    if plan is None:
        text = "is missing; write [launch.nodes] with gpus = the GPUs of each pod, 0 for CPUs"
        yield Problem(_NODES, text)
    else:
        yield from plan.refusals
    if config.launch.nodes is not None and config.launch.nodes.host is not None:
        yield Problem((*_NODES, "host"), "a pod gets its address itself; remove the key")
    if (names := _named_variables(config)) and config.kubernetes.secret is None:
        yield Problem(
            ("kubernetes", "secret"),
            f"is missing, and this config needs {', '.join(names)}; name a Secret with these keys",
        )


def _named_variables(config: RunConfig) -> list[str]:
    """Variables that a config takes from the launcher's."""
    values = config.model_dump(mode="json")
    monitors = (name for monitor in config.monitor for name in monitor.variables)
    return sorted({*variables_named_in(values), *_passed(values), *monitors})


def _passed(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value.get("pass_env") or ()
    for member in value.values() if isinstance(value, dict) else value:
        if isinstance(member, dict | list):
            yield from _passed(member)
