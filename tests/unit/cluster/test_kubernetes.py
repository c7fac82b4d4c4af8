"""The objects of a run on Kubernetes, a pure function of its config."""

from __future__ import annotations

import json
import os
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from configs import RUN_TOML, build_run_config, contradictions_of
from jobset_models import complaints

from gradus.cli.main import main
from gradus.config import RunConfig, load_config
from gradus.errors import ConfigError
from gradus_cluster.kubernetes import Manifest, pod_problems, restarts_jobs

BASE = {
    "name": "demo",
    "launch": {"nodes": {"trainer": [1, 2], "inference": [1, 2]}},
    "trainer": {"num_processes": 2},
    "inference": {"replicas": 2},
    "kubernetes": {"image": "registry.example/gradus:1"},
}


def manifest(changes: dict[str, Any] | None = None, *, jobset: str | None = None) -> Manifest:
    config = build_run_config({**deepcopy(BASE), **(changes or {})})
    assert list(map(str, pod_problems(config))) == []
    return Manifest(config, restarts_jobs=restarts_jobs(jobset))


def objects(found: Manifest) -> dict[str, dict[str, Any]]:
    """By kind, as another program reads them."""
    return {it["kind"]: it for it in yaml.safe_load_all(found.text())}


def jobs(found: Manifest) -> dict[str, dict[str, Any]]:
    """The spec of each Job of the set."""
    replicated = objects(found)["JobSet"]["spec"]["replicatedJobs"]
    assert {it["replicas"] for it in replicated} == {1}
    return {it["name"]: it["template"]["spec"] for it in replicated}


def containers(found: Manifest) -> dict[str, dict[str, Any]]:
    return {name: job["template"]["spec"]["containers"][0] for name, job in jobs(found).items()}


def told(config: RunConfig) -> dict[str, str]:
    return {".".join(map(str, it.path)): it.message for it in pod_problems(config)}


def test_a_run_has_one_pod_for_the_launcher_and_one_for_each_other_node() -> None:
    found = jobs(manifest())
    assert {name: job["completions"] for name, job in found.items()} == {"launcher": 1, "node": 2}
    assert {job["completions"] - job["parallelism"] for job in found.values()} == {0}
    assert list(jobs(manifest({"launch": {"nodes": {}}}))) == ["launcher"]


def test_its_launcher_reads_the_config_that_was_rendered_with_the_claim_as_its_folder(
    tmp_path: Path,
) -> None:
    rendered = objects(manifest({"output_dir": "elsewhere"}))
    path = tmp_path / "run.json"
    path.write_text(rendered["ConfigMap"]["data"]["run.json"])
    read = load_config(RunConfig, ["@", str(path)])
    assert (read.name, read.output_dir) == ("demo", "/runs")
    assert read.launch.nodes == build_run_config(BASE).launch.nodes


def test_the_set_ends_with_its_launcher() -> None:
    spec = objects(manifest())["JobSet"]["spec"]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["launcher"]}


@pytest.mark.parametrize(
    ("version", "actions"),
    [
        *((it, ["FailJobSet"]) for it in (None, "0.6", "0.11.9", "v0.11")),
        *((it, ["FailJobSet", "RestartJob"]) for it in ("0.12", "v0.12.0", "0.13.1", "1.0")),
    ],
)
def test_an_older_jobset_is_not_asked_for_what_it_does_not_know(
    version: str | None, actions: list[str]
) -> None:
    policy = objects(manifest(jobset=version))["JobSet"]["spec"]["failurePolicy"]
    assert [rule["action"] for rule in policy["rules"]] == actions
    assert policy["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]


@pytest.mark.parametrize("version", ["0.5", "new", "0", "0.12\n", "-1.0", "0.12.0.1"])
def test_a_version_that_is_none_or_too_old_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match="--jobset-version"):
        restarts_jobs(version)


def test_what_would_end_so_again_is_not_tried_again_and_a_preempted_pod_does_not_count() -> None:
    for name, job in jobs(manifest()).items():
        final, disrupted, again = job["podFailurePolicy"]["rules"]
        assert (final["action"], final["onExitCodes"]["values"]) == ("FailJob", [64, 78])
        assert (disrupted["action"], again["onExitCodes"]["values"]) == ("Ignore", [75])
        assert again["action"] == ("Count" if name == "launcher" else "Ignore")
        assert job["podReplacementPolicy"] == "Failed"
        assert job["template"]["spec"]["restartPolicy"] == "Never"


def test_a_pod_has_the_time_to_save_and_to_stop() -> None:
    launch = {**BASE["launch"], "save_timeout_seconds": 300.0, "stop_timeout_seconds": 30.0}
    found = manifest({"launch": launch})
    for name, job in jobs(found).items():
        assert job["template"]["spec"]["terminationGracePeriodSeconds"] >= 330, name
    # Until the launcher has saved, no node side is told to end.
    (waits, seconds) = containers(found)["node"]["lifecycle"]["preStop"]["exec"]["command"]
    assert (waits, int(seconds)) == ("sleep", 305)


def test_pods_have_the_gpus_of_the_plan_and_all_limits() -> None:
    nodes = {"gpus": 8}
    sizes = {"trainer": {"num_processes": 16}, "inference": {"tensor_parallel_size": 8}}
    found = containers(manifest({"launch": {"nodes": nodes}, **sizes}))
    for container in found.values():
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert container["resources"]["limits"] == container["resources"]["requests"]
    lists = {"gpus": 8, "trainer": [1, 2], "inference": [3]}
    chosen = {"image": "x", "gpu_resource": "amd.com/gpu", "cpus": 2, "memory_gib": 3}
    found = containers(manifest({"launch": {"nodes": lists}, "kubernetes": chosen, **sizes}))
    assert found["launcher"]["resources"]["limits"] == {"cpu": "2", "memory": "3Gi"}
    assert found["node"]["resources"]["limits"]["amd.com/gpu"] == "8"
    assert "gpu" not in str(containers(manifest())["node"]["resources"])


def test_no_pod_is_root_writes_to_its_image_or_may_speak_to_the_cluster() -> None:
    found = manifest()
    for job in jobs(found).values():
        spec = job["template"]["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 10_001
        inside = spec["containers"][0]["securityContext"]
        assert inside["readOnlyRootFilesystem"] is True
        assert inside["allowPrivilegeEscalation"] is False
        assert inside["capabilities"] == {"drop": ["ALL"]}
    policy = objects(found)["NetworkPolicy"]["spec"]
    labels = jobs(found)["node"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"] == labels
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]


def test_a_claim_of_the_user_is_used_and_not_made() -> None:
    own = {"image": "x", "claim": "mine", "namespace": "lab"}
    rendered = objects(manifest({"kubernetes": own}))
    assert "PersistentVolumeClaim" not in rendered
    assert {it["metadata"]["namespace"] for it in rendered.values()} == {"lab"}
    volumes = jobs(manifest({"kubernetes": own}))["node"]["template"]["spec"]["volumes"]
    assert volumes[0]["persistentVolumeClaim"] == {"claimName": "mine"}
    made = {"image": "x", "storage_gib": 7, "storage_class": "nfs"}
    claim = objects(manifest({"kubernetes": made}))["PersistentVolumeClaim"]["spec"]
    assert claim["resources"]["requests"]["storage"] == "7Gi"
    assert (claim["storageClassName"], claim["accessModes"]) == ("nfs", ["ReadWriteMany"])


SECRETS: list[dict[str, Any]] = [
    {"trainer": {"num_processes": 2, "env_vars": {"A": "se-cret"}}},
    {"inference": {"replicas": 2, "env_vars": {"A": "se-cret"}}},
    {"orchestrator": {"env_vars": {"A": "se-cret"}}},
    {"orchestrator": {"train": {"env": [{"id": "x", "env_vars": {"A": "se-cret"}}]}}},
    {"orchestrator": {"train": {"env": [{"id": "x", "settings": {"api_key": "se-cret"}}]}}},
]


@pytest.mark.parametrize("changes", SECRETS)
def test_a_config_that_holds_secrets_is_a_secret_itself(changes: dict[str, Any]) -> None:
    found = Manifest(build_run_config({**deepcopy(BASE), **changes}))
    rendered = objects(found)
    assert "se-cret" in rendered.pop("Secret")["stringData"]["run.json"]
    assert "se-cret" not in json.dumps(rendered)
    assert "ConfigMap" not in rendered
    volumes = jobs(found)["launcher"]["template"]["spec"]["volumes"]
    assert {"name": "config", "secret": {"secretName": "demo-config"}} in volumes


def test_variables_of_the_launcher_come_from_files_of_a_secret_that_must_be_named() -> None:
    monitor = [{"type": "wandb", "pass_env": ["WANDB_API_KEY", "OURS"]}]
    wish = build_run_config({**deepcopy(BASE), "monitor": monitor})
    assert "OURS, WANDB_API_KEY" in told(wish)["kubernetes.secret"]
    hook = build_run_config({**deepcopy(BASE), "monitor": [{"type": "webhook"}]})
    assert "GRADUS_WEBHOOK_URL" in told(hook)["kubernetes.secret"]
    found = manifest({"monitor": monitor, "kubernetes": {"image": "x", "secret": "mine"}})
    specs = {name: job["template"]["spec"] for name, job in jobs(found).items()}
    volume = {"name": "secrets", "secret": {"secretName": "mine"}}
    assert [volume in spec["volumes"] for spec in specs.values()] == [True, False]
    for container in containers(found).values():
        assert "secret" not in json.dumps(container["env"])


@pytest.mark.parametrize(
    "name", [None, "Demo", "my_run", "a.b", "1st", "a-", "a" * 45, "a--" + "b" * 48]
)
def test_a_name_that_no_object_may_have_is_refused(name: str | None) -> None:
    config = build_run_config({**deepcopy(BASE), "name": name})
    assert list(told(config)) == ["name"]
    assert "at most 44 lower-case" in told(config)["name"]


@pytest.mark.parametrize("name", ["a", "a-1", "a" * 44])
def test_names_of_pods_have_room_in_a_label(name: str) -> None:
    found = manifest({"name": name, "launch": {"nodes": {"number": 1024}}})
    count = jobs(found)["node"]["completions"]
    pods = [f"{name}-node-0-{count - 1}", f"{name}-launcher-0-0"]
    assert max(map(len, pods)) <= 63


@pytest.mark.parametrize(
    ("changes", "key", "text"),
    [
        ({"kubernetes": {}}, "kubernetes.image", "is missing"),
        ({"launch": {}}, "launch.nodes", "gpus = the GPUs of each pod"),
        ({"launch": {"nodes": {"gpus": 1}}}, "launch.nodes.gpus", "a replica takes 4 GPUs"),
        ({"launch": {"nodes": {"host": "a"}}}, "launch.nodes.host", "remove the key"),
        (
            {"kubernetes": {"image": "x", "claim": "a", "storage_gib": 1}},
            "kubernetes.storage_gib",
            "remove either",
        ),
    ],
)
def test_what_cannot_work_there_is_refused_by_its_key(
    changes: dict[str, Any], key: str, text: str
) -> None:
    sizes = {"inference": {"tensor_parallel_size": 4}}
    found = told(build_run_config({**deepcopy(BASE), **sizes, **changes}))
    assert text in found[key]


ODD = ("", "a b", "a\nb", "$(touch X)", "a'b", 'a"b', "-a", "{{ x }}", "a\n")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("image", it) for it in ODD),
        *((key, it) for key in ("namespace", "claim", "storage_class", "secret") for it in ODD),
        *(("namespace", it) for it in ("A", "a_b", "a" * 64, "a-")),
        *(("gpu_resource", it) for it in (*ODD, "gpu", "/gpu")),
        *((key, 0) for key in ("cpus", "memory_gib", "storage_gib", "user")),
        *((key, "8") for key in ("cpus", "memory_gib", "storage_gib", "user")),
        *(("user", 2**31), ("cpus", 1.5), ("cpus", True)),
    ],
)
def test_values_that_an_object_must_not_hold_are_refused(key: str, value: object) -> None:
    try:
        found = str(contradictions_of(build_run_config({"kubernetes": {key: value}})))
    except ValueError as error:
        found = str(error)
    assert f"kubernetes.{key}" in found or f"('kubernetes', '{key}')" in found


@pytest.mark.parametrize(
    "text", ["it's", 'a "b"', "$(touch X)", "a: b\n# c", "{{ .Values.x }}", "é"]
)
def test_texts_of_a_config_arrive_as_they_are(text: str) -> None:
    source = {"id": "x", "settings": {"greeting": text}}
    found = objects(manifest({"orchestrator": {"train": {"env": [source]}}}))
    frozen = json.loads(found["ConfigMap"]["data"]["run.json"])
    assert frozen["orchestrator"]["train"]["env"][0]["settings"]["greeting"] == text


# ------------------------------------------------------------------ the programs in the pods


def start_container(
    container: dict[str, Any], folder: Path, what: str = "command", index: str = "0"
) -> subprocess.CompletedProcess[str]:
    """Run what a pod would, with its folders below another one."""
    command = container["command"] if what == "command" else container[what]["exec"]["command"]
    places = {"/tmp/alive": "alive", "/runs": folder / "runs", "/secrets": folder / "se"}
    for place, other in places.items():
        command = [word.replace(place, str(other)) for word in command]
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": index}
    return subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def pod(tmp_path: Path) -> Path:
    """A folder with a program that says how it was called."""
    program = tmp_path / "gradus"
    program.write_text('#!/bin/sh\necho "$*"\nenv | grep TOKEN\nexit 7\n')
    program.chmod(0o700)
    (tmp_path / "runs").mkdir()
    return tmp_path


def test_a_launcher_begins_a_run_and_continues_it_when_it_comes_back(pod: Path) -> None:
    launcher = containers(manifest())["launcher"]
    first = start_container(launcher, pod)
    assert (first.stdout, first.returncode) == ("rl @ /config/run.json\n", 7)
    (pod / "runs" / "demo").mkdir()
    assert "--resume" not in start_container(launcher, pod).stdout
    (pod / "runs" / "demo" / ".gradus-run").touch()
    assert start_container(launcher, pod).stdout == "rl @ /config/run.json --resume\n"


def test_a_launcher_takes_variables_from_files_and_no_other_names(pod: Path) -> None:
    (pod / "se").mkdir()
    files = {"HF_TOKEN": "a 'b' $(touch X)\n", "bad-TOKEN": "x", "1TOKEN": "y", "..TOKEN": "z"}
    for name, content in files.items():
        (pod / "se" / name).write_text(content)
    found = start_container(containers(manifest())["launcher"], pod)
    assert found.stdout.splitlines()[1:] == ["HF_TOKEN=a 'b' $(touch X)"]
    assert (found.stderr, list(pod.rglob("X"))) == ("", [])


def test_a_node_side_has_the_number_after_that_of_its_pod(pod: Path) -> None:
    found = start_container(containers(manifest())["node"], pod, index="1")
    assert found.stdout == f"node {pod}/runs/demo --stay --number 2\n"


def test_probes_see_who_started_who_is_silent_and_who_can_serve(pod: Path) -> None:
    found = containers(manifest())

    def passes(role: str, what: str, index: str = "0") -> bool:
        return start_container(found[role], pod, f"{what}Probe", index).returncode == 0

    ready = pod / "runs" / "demo" / "ready"
    ready.mkdir(parents=True)
    alive = pod / "alive"
    kinds = ("startup", "liveness")
    assert [passes("node", what) for what in kinds] == [False, False]
    alive.touch()
    assert [passes("node", what) for what in kinds] == [True, True]
    os.utime(alive, (1, 1))
    assert not passes("launcher", "liveness")
    (ready / "inference_1.json").touch()
    assert [passes("node", "readiness", index) for index in "01"] == [False, True]
    assert not passes("launcher", "readiness")
    (ready / "orchestrator.json").touch()
    assert passes("launcher", "readiness")


# ------------------------------------------------------------------ the command


def test_the_command_prints_what_kubectl_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN_TOML)
    words = ["render", "kubernetes", "@", str(path), "--name", "mine", "--kubernetes.image", "x"]
    assert main(words) == 64
    assert "launch.nodes: is missing" in capsys.readouterr().err
    assert main([*words, "--launch.nodes.gpus", "8", "--jobset-version", "0.12"]) == 0
    printed = capsys.readouterr().out
    kinds = [it["kind"] for it in yaml.safe_load_all(printed)]
    assert kinds == ["ConfigMap", "PersistentVolumeClaim", "NetworkPolicy", "JobSet"]
    assert "kubectl logs -f job/mine-launcher-0 " in printed


@pytest.mark.parametrize(
    "words", [[], ["helm"], ["kubernetes"], ["kubernetes", "--jobset-version"]]
)
def test_a_command_that_says_too_little_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["render", *words]) == 64
    assert "render kubernetes" in capsys.readouterr().err or words[1:]


# ------------------------------------------------------------------ validators of others


def plain(found: Manifest) -> list[dict[str, Any]]:
    """Objects that every Kubernetes knows: the Jobs in the place of their set."""
    rendered = objects(found)
    rendered.pop("JobSet")
    made = [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": job}
        for name, job in jobs(found).items()
    ]
    return [*rendered.values(), *made]


def test_kubernetes_own_schemas_find_nothing_to_refuse() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    secret = {"image": "x", "secret": "mine", "storage_class": "nfs", "namespace": "lab"}
    for changes in ({}, {"kubernetes": secret}, SECRETS[0], {"launch": {"nodes": {"gpus": 8}}}):
        wish = Manifest(build_run_config({**deepcopy(BASE), **changes}), restarts_jobs=True)
        for entry in plain(wish):
            validate(entry, "1.37", strict=True)
    wrong = plain(manifest())[-1]
    wrong["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    with pytest.raises(Exception, match="livenessprobe"):
        validate(wrong, "1.37", strict=True)


def changed(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value at a path, whose numbers count in lists."""
    copied = deepcopy(document)
    *above, last = [int(it) if it.isdigit() else it for it in path.split(".")]
    place: Any = copied
    for key in above:
        place = place[key]
    place[last] = value
    return copied


JOB = "spec.replicatedJobs.1.template.spec"
POD, RULE = f"{JOB}.template.spec", f"{JOB}.podFailurePolicy.rules.0"
WRONG = {
    "spec.failurePolicy.onExit": (1, "spec.failurePolicy.onExit is no field"),
    "spec.failurePolicy.rules.0.action": ("Restart", "is 'Restart', which is none of FailJobSet,"),
    "spec.failurePolicy.maxRestarts": ("3", "is '3': Input should be a valid integer"),
    "spec.failurePolicy.rules": ({}, "Input should be a valid list"),
    "spec.network.enableDNSHostnames": ("yes", "Input should be a valid boolean"),
    "spec.network.enableDnsHostnames": (True, "is no field"),
    "spec.successPolicy": ({"targetReplicatedJobs": ["launcher"]}, "operator is missing"),
    "spec.replicatedJobs.0.name": (7, "is 7: Input should be a valid string"),
    f"{JOB}.backOffLimit": (1, "backOffLimit is no field"),
    f"{RULE}.onExitCodes.values": (
        ["64"],
        "Input should be a valid integer",
    ),
    f"{POD}.containers.0.livenessprobe": ({}, "livenessprobe is no field"),
    f"{POD}.containers.0.resources.limits.cpu": ([8], "cpu is [8]"),
    f"{POD}.terminationGracePeriodSeconds": (1.5, "Input should be a valid integer"),
}
"""Place in a JobSet → a value that is wrong there, and what is said of it."""


def test_jobsets_own_definition_finds_nothing_to_refuse() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    kind = models.JobsetV1alpha2JobSet
    secret = {"image": "x", "secret": "mine", "storage_class": "nfs", "namespace": "lab"}
    for changes in ({}, {"kubernetes": secret}, SECRETS[0], {"launch": {"nodes": {"gpus": 8}}}):
        for version in (False, True):
            wish = Manifest(build_run_config({**deepcopy(BASE), **changes}), version)
            assert list(complaints(kind, objects(wish)["JobSet"], "")) == []


@pytest.mark.parametrize("place", WRONG)
def test_jobsets_own_definition_finds_what_is_wrong(place: str) -> None:
    """A key, a value, a type, on each level."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    value, text = WRONG[place]
    found = changed(objects(manifest(jobset="0.12"))["JobSet"], place, value)
    (told,) = complaints(models.JobsetV1alpha2JobSet, found, "")
    assert told.startswith(f".{place.rpartition('.')[0]}")
    assert text in told
