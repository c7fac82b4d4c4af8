"""The pods of a rendered run in Podman: killed ones come back, and it ends as on one machine.

`make kubernetes` runs it; it is no part of `make test`. The test does what a Job does: it makes a
pod for each index, and a new one for a pod that has failed. Images hold no gradus here: the pods
see this machine's Python and this folder.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import finish, start, wait_until
from scripted_runs import SCRIPTED, assert_same_run, write_config

from gradus.files import read_json
from gradus.run.paths import RunDirectory

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.torch,
    pytest.mark.skipif("GRADUS_PODS" not in os.environ, reason="`make kubernetes` runs pods"),
]
REPOSITORY = Path(__file__).parents[2]
IMAGE = "localhost/gradus-bare:1"
NAME = "gradus-pods"
USER = 10_001
SEEN = ("/usr", "/etc/ssl", sys.base_prefix, str(REPOSITORY))
"""Folders of this machine that pods see."""
JOB = f"""
[inference]
replicas = 2
[launch.nodes]
trainer = [1, 2]
inference = [1, 2]
away_seconds = 10
[kubernetes]
image = "{IMAGE}"
cpus = 2
memory_gib = 8
"""
END_SECONDS = 500.0
ENGINE = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
runtime = "runc"
"""


class Cluster:
    """Runs pods of rendered objects, one for each index of each Job."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "containers.conf").write_text(ENGINE)
        self.volume = Path()

    def ask(self, *words: str, text: str = "", check: bool = True) -> str:
        env = {**os.environ, "CONTAINERS_CONF": str(self._folder / "containers.conf")}
        done = subprocess.run(
            ["podman", *words], input=text, capture_output=True, text=True, env=env, check=False
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def make_image(self) -> None:
        """One without anything: everything is mounted."""
        path = self._folder / "image.tar"
        with tarfile.open(path, "w") as tar:
            for name in ("usr", "etc/ssl", "runs", "config", "proc", "sys", "dev", "tmp"):
                entry = tarfile.TarInfo(name)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                # Podman gives a new volume the owner of the folder that it is mounted over.
                entry.uid = entry.gid = USER if name in ("runs", "tmp") else 0
                tar.addfile(entry)
            for name in ("bin", "lib", "lib64"):
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{name}"
                tar.addfile(entry)
            content = f"gradus:x:{USER}:{USER}::/tmp:/bin/sh\n".encode()
            entry = tarfile.TarInfo("etc/passwd")
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
        self.ask("import", "--change", "ENV PATH=/usr/bin", str(path), IMAGE)

    def make_volume(self, model: Path) -> None:
        self.ask("volume", "create", NAME)
        place = self.ask("volume", "inspect", "--format", "{{.Mountpoint}}", NAME).strip()
        self.volume = Path(place)
        shutil.copytree(model, self.volume / "models" / "tiny")
        for path in (self.volume, *self.volume.rglob("*")):
            os.chown(path, USER, USER)

    def start(self, objects: list[dict[str, Any]], pod: str) -> None:
        """A pod, or another one in its place."""
        self.end(pod)
        role, index = pod.split("-0-")
        made = next(it for it in objects if it["kind"] == "JobSet")
        template = next(
            it["template"]["spec"]["template"]
            for it in made["spec"]["replicatedJobs"]
            if it["name"] == role
        )
        spec = template["spec"]
        (container,) = spec["containers"]
        mounts = [{"name": f"h{n}", "mountPath": at} for n, at in enumerate(SEEN)]
        folders = [{"name": f"h{n}", "hostPath": {"path": at}} for n, at in enumerate(SEEN)]
        own = {
            **container,
            "env": [*container["env"], {"name": "JOB_COMPLETION_INDEX", "value": index}],
            "volumeMounts": [
                *container["volumeMounts"],
                *({**mount, "readOnly": True} for mount in mounts),
            ],
        }
        whole = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**template["metadata"], "name": f"{NAME}-{pod}"},
            "spec": {**spec, "containers": [own], "volumes": [*spec["volumes"], *folders]},
        }
        read = [it for it in objects if it["kind"] == "ConfigMap"]
        self.ask("kube", "play", "-", text=yaml.safe_dump_all([*read, whole]))

    def kill(self, pod: str) -> None:
        self.ask("kill", "--signal", "KILL", f"{NAME}-{pod}-gradus")

    def said(self, pod: str) -> str:
        return self.ask("logs", f"{NAME}-{pod}-gradus", check=False)

    def exit_code(self, pod: str) -> int | None:
        """None while it runs."""
        form = "{{.State.Running}} {{.State.ExitCode}}"
        running, code = self.ask("inspect", "--format", form, f"{NAME}-{pod}-gradus").split()
        return None if running == "true" else int(code)

    def end(self, pod: str) -> None:
        self.ask("pod", "rm", "--force", "--ignore", f"{NAME}-{pod}", check=False)

    def close(self) -> None:
        for pod in PODS:
            self.end(pod)
        self.ask("volume", "rm", "--force", NAME, f"{NAME}-config", check=False)
        self.ask("image", "rm", "--force", IMAGE, check=False)


PODS = ("launcher-0-0", "node-0-0", "node-0-1")


@pytest.fixture
def cluster(tmp_path: Path, tiny_model: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    try:
        cluster.make_image()
        cluster.make_volume(tiny_model)
        yield cluster
    finally:
        cluster.close()


def render(folder: Path) -> list[dict[str, Any]]:
    """The objects of the run, whose `gradus` is that with the scripted engine."""
    config = Path(write_config(folder, NAME, Path("/runs/models/tiny")))
    config.write_text(config.read_text() + JOB)
    done = subprocess.run(
        [sys.executable, *SCRIPTED, "render", "kubernetes", "@", str(config)],
        env={**os.environ, "SCRIPTED_LATENCY_SECONDS": "1.5"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.timeout(1500)
def test_killed_pods_come_back_and_the_run_is_that_of_one_machine_bit_for_bit(
    cluster: Cluster, tmp_path: Path, tiny_model: Path
) -> None:
    objects = render(tmp_path)
    # Node sides may be there before their launcher.
    for pod in reversed(PODS):
        cluster.start(objects, pod)
    run_dir = RunDirectory(cluster.volume / NAME)

    def wait_for_step(step: int) -> None:
        folder = run_dir.checkpoints / f"step_{step:08d}"
        wait_until(
            lambda: folder.exists() or cluster.exit_code("launcher-0-0") is not None,
            timeout_seconds=END_SECONDS,
            what=f"checkpoint {step}",
        )
        assert cluster.exit_code("launcher-0-0") is None, cluster.said("launcher-0-0")

    wait_for_step(1)
    cluster.kill("node-0-0")
    told_before = cluster.said("node-0-0")
    cluster.start(objects, "node-0-0")
    wait_for_step(3)
    first = cluster.said("launcher-0-0")
    cluster.kill("launcher-0-0")
    cluster.start(objects, "launcher-0-0")
    wait_until(
        lambda: cluster.exit_code("launcher-0-0") is not None,
        timeout_seconds=END_SECONDS,
        what="the end of the run",
    )
    last = cluster.said("launcher-0-0")
    sides = [cluster.said(pod) for pod in PODS[1:]]
    (tmp_path / "said.log").write_text("\n".join((told_before, first, last, *sides)))
    assert cluster.exit_code("launcher-0-0") == 0
    assert "is given up" in first
    assert "resumed" in last or "from checkpoint" in last
    assert ["; tries again" in text for text in sides] == [True, True]
    assert read_json(run_dir.lease)["term"] > 2
    finish(start("rl", "@", write_config(tmp_path, "straight", tiny_model), program=SCRIPTED))
    assert_same_run(run_dir.root, tmp_path / "straight")
