"""The job of a run in SLURM: what its script does, and what is refused before there is one.

Programs of a few lines stand for `gradus`, `srun`, `scontrol`, `sbatch` and `squeue`.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from commands import wait_until
from configs import build_eval_config, build_run_config, contradictions_of

from gradus.config import RunConfig, load_config
from gradus.config.schema.run import SlurmConfig
from gradus.errors import ConfigError, DeadlineError, ExitCode
from gradus.files import read_json, write_json
from gradus.orchestrator.evaluation.episodes import EpisodeKey, EvaluatedEpisode
from gradus.orchestrator.records.episodes import encode_record
from gradus.orchestrator.types import PlayedEpisode
from gradus.run.lease import Owner, reopen_run
from gradus.testing.episodes import build_episode
from gradus.wire.versions import VersionSpan
from gradus_cluster import slurm
from gradus_cluster.slurm import SlurmJob, submit

ODD = 'it\'s a "résumé" $(touch X) `touch X` #'
GRADUS = """#!/bin/bash
printf '%s\\n' "$*" >> "$0.called"
case $1 in
  rl | eval) source "$0.rl" ;;
  node) source "$0.node" ;;
esac
"""
FAKES = {
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
    "sleep": "exec /bin/sleep 0.02",
    "scontrol": """
if [ "$1" = requeue ]; then echo "$*" >> "$0.called"
else echo "JobId=12 Restarts=$(cat "$0.restarts") BatchFlag=1"; fi
""",
    "sbatch": 'echo "$*" >> "$0.called"; [ "$1" = --parsable ] && echo 12; true',
    "squeue": 'cat "$0.state" 2> /dev/null',
}


class Cluster:
    """A folder of programs in the place of SLURM and gradus."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / ODD
        self.folder.mkdir()
        self.put("gradus", GRADUS)
        for name, program in FAKES.items():
            self.put(name, f"#!/bin/bash\n{program}\n")
        self.put("scontrol.restarts", "0")
        monkeypatch.setenv("PATH", f"{self.folder}:{os.environ['PATH']}")
        monkeypatch.setenv("SLURM_JOB_ID", "12")
        monkeypatch.setattr(slurm, "PROGRAM", (str(self.folder / "gradus"),))

    def put(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o700)

    def called(self, name: str) -> list[str]:
        path = self.folder / f"{name}.called"
        return path.read_text().splitlines() if path.exists() else []

    def job(self, **changes: object) -> SlurmJob:
        nodes = {"trainer": [0], "inference": [1]}
        values = {"launch": {"nodes": nodes}, "output_dir": str(self.folder), **changes}
        return SlurmJob(build_run_config(values), "mine", ("--log-every", "7"), self.folder)

    def start(self, job: SlurmJob, launcher: str, *, node: str = "exit 0") -> subprocess.Popen[str]:
        """The job as SLURM starts it, with a program as its launcher and what a node side says."""
        self.put("gradus.rl", launcher)
        self.put("gradus.node", node)
        job.run_dir.config.mkdir(parents=True, exist_ok=True)
        if not job.run_dir.lease.exists():
            write_json(job.run_dir.lease, {"term": 1, "owner": None})
        script = self.folder / "job.sh"
        script.write_text(job.script())
        return subprocess.Popen(["bash", str(script)], cwd="/", start_new_session=True)

    def run(self, job: SlurmJob, launcher: str, *, node: str = "exit 0") -> int:
        return self.start(job, launcher, node=node).wait(60)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path, monkeypatch)


def test_a_job_starts_its_launcher_and_a_side_for_each_other_node_in_folders_of_any_name(
    cluster: Cluster,
) -> None:
    job = cluster.job()
    assert cluster.run(job, "exit 0") == 0
    run = job.run_dir.root
    assert sorted(cluster.called("gradus")) == [
        f"node {run} --number 1",
        f"rl @ {run}/config/slurm.json --resume --log-every 7",
    ]
    assert cluster.called("scontrol") == []
    assert not list(cluster.folder.rglob("X"))


@pytest.mark.parametrize(("cpus", "asked"), [(None, ""), (12, " --cpus-per-task=12")])
def test_a_node_side_has_all_cpus_that_the_job_has_there(
    cluster: Cluster, cpus: int | None, asked: str
) -> None:
    cluster.put("srun", '#!/bin/bash\necho "$*" > "$0.called"\n')
    assert cluster.run(cluster.job(slurm={"cpus": cpus}), "exit 0") == 0
    (line,) = cluster.called("srun")
    assert line.partition(" --relative=1 ")[2].startswith(f"--cpu-bind=none{asked} ")


def test_a_job_waits_in_the_queue_again_while_each_one_saves_or_for_the_third_time(
    cluster: Cluster,
) -> None:
    job = cluster.job()
    saves = 'mkdir -p "${3%/config/*}/checkpoints/step_$$"; exit 75'
    for launcher in ("exit 75", "exit 75", saves, "exit 75", "exit 75"):
        assert cluster.run(job, launcher) == 75
    assert cluster.called("scontrol") == 5 * ["requeue 12"]
    assert cluster.run(job, "exit 75") == 75
    assert cluster.called("scontrol") == 5 * ["requeue 12"]


def test_so_does_that_of_an_evaluation_while_each_one_plays_episodes_without_error(
    cluster: Cluster,
) -> None:
    values = {"launch": {"nodes": {"inference": [1]}}, "output_dir": str(cluster.folder)}
    job = SlurmJob(build_eval_config(values), "mine", (), cluster.folder)
    assert (job.kind, job.num_nodes) == ("eval", 2)
    plays = 'cd "${3%/config/*}"; mkdir -p episodes/step_0; cp next episodes/step_0/eval.jsonl'

    def play(num_finished: int, *, error: str) -> int:
        keys = [EpisodeKey("words", task, 0) for task in range(num_finished + 1)]
        played = PlayedEpisode("", "", VersionSpan(0, 0), build_episode(reward=1.0))
        finished = [EvaluatedEpisode(key, played) for key in keys[:-1]]
        ended = [*finished, keys[-1].failed(0, "ProviderError", error)]
        job.run_dir.root.mkdir(exist_ok=True)
        lines = [encode_record(it.record([])) + b"\n" for it in ended]
        (job.run_dir.root / "next").write_bytes(b"".join(lines))
        return cluster.run(job, f"{plays}; exit 75")

    for num_finished, error in ((1, ""), (2, ""), (3, ""), (3, "longer"), (3, "once more")):
        assert play(num_finished, error=error) == 75
    assert cluster.called("scontrol") == 5 * ["requeue 12"]
    assert play(3, error="") == 75
    assert cluster.called("scontrol") == 5 * ["requeue 12"]
    assert f"eval @ {job.run_dir.root}/config/slurm.json --resume" in cluster.called("gradus")


@pytest.mark.parametrize("code", [64, 70, 78, 130])
def test_what_would_end_so_again_is_not_tried_again(cluster: Cluster, code: int) -> None:
    assert cluster.run(cluster.job(), f"exit {code}") == code
    assert cluster.called("scontrol") == []


def test_a_job_that_shall_not_be_requeued_ends(cluster: Cluster) -> None:
    assert cluster.run(cluster.job(slurm={"requeue": False}), "exit 75") == 75
    assert cluster.called("scontrol") == []


def test_a_job_that_was_started_again_elsewhere_does_not_disturb_that_start(
    cluster: Cluster,
) -> None:
    cluster.put("scontrol.restarts", "1")
    assert cluster.run(cluster.job(), "exit 75") == 75
    assert cluster.called("scontrol") == []


def test_a_job_whose_run_another_launcher_has_does_not_take_it_back(cluster: Cluster) -> None:
    job = cluster.job()
    job.run_dir.config.mkdir(parents=True)
    write_json(job.run_dir.lease, {"term": 2, "owner": vars(Owner.current())})
    assert cluster.run(job, "exit 75") == 75
    assert cluster.called("scontrol") == []


WAITS = """
trap 'exit 75' TERM
touch "$0.waits"
while true; do sleep 0.05; done
"""


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_warned_job_saves_and_waits_again_and_a_cancelled_one_ends(
    cluster: Cluster, is_cancelled: bool
) -> None:
    process = cluster.start(cluster.job(), WAITS)
    waits = cluster.folder / "gradus.waits"
    wait_until(waits.exists, what="the launcher runs")
    if is_cancelled:
        os.killpg(process.pid, signal.SIGTERM)  # all processes of the job get it
    else:
        process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 75
    assert cluster.called("scontrol") == ([] if is_cancelled else ["requeue 12"])


def test_a_node_side_comes_back_until_it_is_refused(cluster: Cluster) -> None:
    count = 'grep -c ^node "$0.called"'
    waits = f'until [ "$({count})" = 3 ]; do sleep 0.05; done'
    node = f'[ "$({count})" -lt 3 ] && exit 137; exit 64'
    assert cluster.run(cluster.job(), waits, node=node) == 0
    assert len([it for it in cluster.called("gradus") if it.startswith("node")]) == 3


def test_a_submission_leaves_a_run_that_continues_with_what_was_written_then(
    cluster: Cluster,
) -> None:
    job = cluster.job(trainer={"env_vars": {"A": "1"}})
    lines = submit(job, resume=False, clean=False)
    assert "job 12 on 2 nodes" in lines[1]
    run_dir = job.run_dir
    frozen = load_config(RunConfig, ["@", str(run_dir.slurm_config)])
    assert frozen == job.config.model_copy(update={"name": "mine"})
    assert run_dir.slurm_config.stat().st_mode & 0o777 == 0o600
    reopen_run(cluster.folder, "mine", kind="rl").release()


def test_a_second_job_of_a_run_is_refused_while_the_first_waits_or_runs(cluster: Cluster) -> None:
    job = cluster.job()
    submit(job, resume=False, clean=False)
    cluster.put("squeue.state", "PENDING\n")
    for resume, clean in ((False, False), (True, False), (False, True)):
        with pytest.raises(ConfigError, match=r"job 12 .* is pending already; .*scancel 12"):
            submit(job, resume=resume, clean=clean)
    assert read_json(job.run_dir.slurm_job) == {"job": "12"}
    cluster.put("squeue.state", "")
    submit(job, resume=True, clean=False)
    submit(job, resume=False, clean=False)  # neither has begun


def test_what_slurm_refuses_is_told_before_anything_is_written(cluster: Cluster) -> None:
    job = cluster.job()
    says = ("sbatch: error: invalid partition specified: x", "allocation failure: Invalid name")
    cluster.put("sbatch", f"#!/bin/bash\nprintf '%s\\n' {shlex.join(says)} >&2; exit 1\n")
    with pytest.raises(ConfigError, match="job: invalid partition specified: x; Invalid") as info:
        submit(job, resume=False, clean=False)
    assert info.value.exit_code == ExitCode.CONFIG
    assert not job.run_dir.root.exists()
    cluster.put("sbatch", "#!/bin/bash\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    with pytest.raises(DeadlineError, match="SLURM does not answer"):
        submit(job, resume=False, clean=False)


def test_a_job_that_the_queue_does_not_take_leaves_room_for_another_try(cluster: Cluster) -> None:
    job = cluster.job()
    takes = (cluster.folder / "sbatch").read_text()
    cluster.put("sbatch", "#!/bin/bash\n[ $1 = --test-only ] || { echo full >&2; exit 1; }\n")
    with pytest.raises(ConfigError, match="refuses this job: full"):
        submit(job, resume=False, clean=False)
    cluster.put("sbatch", takes)
    submit(job, resume=False, clean=False)


def test_without_sbatch_there_is_a_clear_line(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"no sbatch, .* --dry-run"):
        submit(cluster.job(), resume=False, clean=False)


def test_without_nodes_a_job_has_no_size(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match=r"launch.nodes is missing"):
        cluster.job(launch={}).script()


@pytest.mark.parametrize("folder", ["a%j", "a\\b", "a\nb"])
def test_a_folder_that_slurm_would_rename_is_refused(cluster: Cluster, folder: str) -> None:
    with pytest.raises(ConfigError, match="choose another folder"):
        cluster.job(output_dir=str(cluster.folder / folder)).script()


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        *(("90", 5400), ("1:30", 120), ("12:00:00", 43200), ("2-0", 172800)),
        *(("1-2:03", 93780), ("1-02:03:04", 93840)),
    ],
)
def test_times_are_read_as_slurm_reads_them(time: str, seconds: int) -> None:
    assert SlurmConfig(time=time).seconds == seconds


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("partition", it) for it in ("a b", "a\nb", "$(touch X)", "a'b", 'a"b', "-N9", "")),
        *(("account", it) for it in ("a\n#SBATCH --wrap=x", "`touch X`")),
        *(("time", it) for it in ("soon", "1:2:3:4", "1:99", "-1", "10\n")),
        *(("extra", [it]) for it in ("-N9", "--a b", "--comment=a\nb", "nodes", "--a=")),
        *(("extra", [it]) for it in ("--nodes=9", "--sig=B:USR1@1", "--wrap=x", "--part=x")),
    ],
)
def test_values_that_a_script_must_not_hold_are_refused(key: str, value: object) -> None:
    try:
        told = str(contradictions_of(build_run_config({"slurm": {key: value}})))
    except ValueError as error:
        told = str(error)
    assert f"slurm.{key}" in told or f"('slurm', '{key}')" in told


def test_a_job_too_short_for_a_start_and_a_checkpoint_is_refused() -> None:
    config = build_run_config({"slurm": {"time": "10"}})
    (problem,) = contradictions_of(config)
    assert "use at least 11 minutes" in str(problem)
