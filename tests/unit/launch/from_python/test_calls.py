"""`gradus.train` and its like: what is launched, what is refused, and what is raised in the end."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import commit
from configs import build_run_values

import gradus
from gradus.config import EvalConfig, RunConfig, SftConfig, resolve_sources
from gradus.errors import ConfigError, GradusError, ProcessError
from gradus.files import write_atomically, write_json
from gradus.launch.episodes import Episodes
from gradus.launch.from_python import calls
from gradus.launch.from_python.calls import _named_variables
from gradus.launch.job import Job
from gradus.launch.steps import Steps
from gradus.processes.child import LAUNCH_VARIABLE
from gradus.run.checkpoints import CheckpointStore
from gradus.run.lease import choose_opener
from gradus.run.paths import RunDirectory
from gradus.run.recording import note_launched

MODEL = build_run_values()["model"]
ROWS = [{"prompt": "2+2", "answer": "4"}, {"prompt": "3+3", "answer": "6"}]


def score(reply: str) -> float:
    return float(len(reply))


class FakeLaunch:
    """Opens the run's folder as a launch does, writes what it is given, and ends with a code."""

    def __init__(self) -> None:
        self.code = 0
        self.jobs: list[Job] = []
        self.finish: Callable[[RunDirectory], None] = lambda run_dir: write_json(
            run_dir.summary, {"outcome": "done"}
        )

    def __call__(self, job: Job, *, resume: bool, clean: bool) -> int:
        opener = choose_opener(resume=resume, clean=clean, dry_run=False)
        lease = opener(job.output_dir, job.name, kind=job.kind)
        for name, text in job.files.items():
            write_atomically(lease.run_dir.from_python / name, text.encode())
        assert job.written is not None
        written = job.written.without_secrets(only_written=True)
        note_launched(lease.run_dir, job.kind, job.written.without_secrets(), written=written)
        self.finish(lease.run_dir)
        lease.release()
        self.jobs.append(job)
        return self.code

    @property
    def config(self) -> Any:
        """What the last job was launched with."""
        return self.jobs[-1].written


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeLaunch:
    fake = FakeLaunch()
    monkeypatch.setattr(calls, "launch", fake)
    monkeypatch.chdir(tmp_path)
    return fake


def test_six_lines_become_a_run_with_their_rows_and_function(launched: FakeLaunch) -> None:
    run = gradus.train(
        model=MODEL, tasks=ROWS, reward=score, max_steps=3, lr=1e-3, group_size=4, seed=2
    )
    assert isinstance(launched.config, RunConfig)
    (source,) = launched.config.orchestrator.train.env
    folder = run.path.resolve() / "from_python"
    assert (source.id, source.unique_name, source.group_size) == ("jsonl", "tasks", 4)
    assert source.taskset == {
        "path": str(folder / "tasks.jsonl"),
        "reward": {f"{folder / 'score.py'}:score": 1.0},
    }
    assert launched.config.trainer.optimizer.lr == 1e-3
    assert [json.loads(it) for it in (folder / "tasks.jsonl").read_text().splitlines()] == ROWS
    assert (run.outcome, repr(run)) == ("done", f"<run {run.path}: done>")


def test_what_is_measured_stands_beside_what_trains(launched: FakeLaunch) -> None:
    gradus.train(model=MODEL, tasks=ROWS, reward=score, eval_tasks=ROWS[:1], max_steps=3)
    (measured,) = launched.config.orchestrator.eval.env
    assert measured.unique_name == "held-out"
    assert measured.taskset["path"].endswith("from_python/held-out.jsonl")
    gradus.train(model=MODEL, tasks=ROWS, reward=score, eval_tasks="reverse-text", max_steps=3)
    (measured,) = launched.config.orchestrator.eval.env
    assert (measured.id, measured.taskset) == ("reverse-text", {})


@pytest.mark.parametrize(
    "keywords", [{"max_completion_tokens": 16}, {"sampling": {"max_completion_tokens": 16}}]
)
def test_what_is_measured_is_sampled_as_what_trains(
    keywords: dict[str, Any], launched: FakeLaunch
) -> None:
    call: dict[str, Any] = {"model": MODEL, "tasks": ROWS, "reward": score, "max_steps": 3}
    gradus.train(**call, eval_tasks=ROWS[:1], **keywords)
    sources = resolve_sources(launched.config).all
    assert [it.purpose for it in sources] == ["train", "eval"]
    assert {it.complete.sampling.max_completion_tokens for it in sources} == {16}


def test_an_environment_is_named_by_its_id(launched: FakeLaunch) -> None:
    gradus.train(model=MODEL, tasks="reverse-text", max_steps=3, taskset={"seed": 3})
    assert launched.config.orchestrator.train.env[0].taskset == {"seed": 3}
    assert launched.jobs[-1].files == {}


def test_conversations_become_a_supervised_run(launched: FakeLaunch) -> None:
    rows = [{"prompt": "a", "completion": "b"}]
    run = gradus.sft(model=MODEL["name"], data=rows, max_steps=2, name="mine")
    assert isinstance(launched.config, SftConfig)
    assert Path(launched.config.data.path) == run.path.resolve() / "from_python/conversations.jsonl"
    assert run.path.name == "mine"


def test_an_evaluation_is_refused_when_every_episode_failed(launched: FakeLaunch) -> None:
    def failed(run_dir: RunDirectory) -> None:
        told = {"error": {"type": "RewardError", "message": "reward 'score' failed"}}
        write_atomically(
            run_dir.episodes / "step_0" / "eval.jsonl",
            json.dumps({"gradus": told}).encode() + b"\n",
        )
        results = {"overall": {"num_episodes": 1, "planned_episodes": 1, "errors": {"x": 1}}}
        write_json(run_dir.root / "results.json", results)

    launched.finish, launched.code = failed, 75
    with pytest.raises(ProcessError, match=r"every episode failed.*reward 'score' failed"):
        gradus.evaluate(model=MODEL, tasks=ROWS, reward=score)
    assert isinstance(launched.config, EvalConfig)


def test_replies_come_with_the_keys_of_their_rows_in_order(launched: FakeLaunch) -> None:
    def episode(number: int, reply: str) -> str:
        nodes = [
            {"message": {"role": "user", "content": f"say {number}"}},
            {"message": {"role": "assistant", "content": reply}, "sampled": True},
        ]
        task = {"index": number, "key": "k"}
        data = {"data": {"row": {"prompt": "x", "n": number}}}
        value = {"traces": [{"nodes": nodes}], "gradus": {"task": task}, "task": data}
        return json.dumps(value) + "\n"

    def played(run_dir: RunDirectory) -> None:
        text = episode(1, "two") + episode(0, "one")
        write_atomically(run_dir.episodes / "step_0" / "eval.jsonl", text.encode())
        write_json(run_dir.summary, {"outcome": "done"})

    launched.finish = played
    assert gradus.generate(model=MODEL, tasks=["say 0", "say 1"]) == [
        {"prompt": "say 0", "n": 0, "reply": "one", "error": ""},
        {"prompt": "say 1", "n": 1, "reply": "two", "error": ""},
    ]
    workload = launched.jobs[-1].workload
    assert isinstance(workload, Episodes)
    assert (workload.is_rated, workload.from_python) == (False, True)


def test_the_same_call_continues_its_run_and_so_does_its_folder(launched: FakeLaunch) -> None:
    call: dict[str, Any] = {"model": MODEL, "tasks": ROWS, "reward": score, "name": "mine"}
    gradus.train(**call, max_steps=3)
    gradus.train(**call, max_steps=4, resume=True)
    run = gradus.train(resume="runs/mine", max_steps=5)
    assert launched.config.max_steps == 5
    assert launched.config.orchestrator == launched.jobs[0].written.orchestrator  # type: ignore[union-attr]
    assert launched.jobs[-1].files == {}
    assert (run.path / "from_python" / "score.py").is_file()


def test_a_run_as_a_model_brings_its_lengths_along(launched: FakeLaunch) -> None:
    sizes = {**MODEL, "max_length_tokens": 700, "renderer": "qwen3"}
    run = gradus.train(model=sizes, tasks=ROWS, reward=score, max_steps=3)
    with pytest.raises(ConfigError, match="has no final model"):
        gradus.evaluate(model=run, tasks=ROWS)
    write_json(run.path / "model" / "config.json", {})
    section = calls._model(run)
    assert (section["max_length_tokens"], section["renderer"]) == (700, "qwen3")
    assert section["name"] == str(run.path.resolve() / "model")


def test_an_interrupt_is_raised_with_the_run_and_how_to_continue(launched: FakeLaunch) -> None:
    launched.code = 130
    with pytest.raises(KeyboardInterrupt, match=r"nothing was saved yet.*starts again at step 1"):
        gradus.train(model=MODEL, tasks=ROWS, reward=score, max_steps=3)

    def saved(run_dir: RunDirectory) -> None:
        commit(CheckpointStore(run_dir, term=1), 2)

    launched.finish = saved
    with pytest.raises(KeyboardInterrupt, match=r"resume=.*continues it") as raised:
        gradus.train(model=MODEL, tasks=ROWS, reward=score, max_steps=3)
    assert isinstance(raised.value, gradus.RunInterrupted)
    assert raised.value.run.path.is_dir()
    assert launched.jobs[-1].saves_when_interrupted


def test_a_second_run_of_the_same_name_says_what_to_do(launched: FakeLaunch) -> None:
    call: dict[str, Any] = {"model": MODEL, "tasks": ROWS, "max_steps": 3, "name": "mine"}
    gradus.train(**call)
    with pytest.raises(GradusError, match="continue with resume=True, delete that run with clean"):
        gradus.train(**call)
    assert gradus.train(**call, clean=True).outcome == "done"


async def test_a_running_event_loop_changes_nothing(launched: FakeLaunch) -> None:
    assert asyncio.get_running_loop().is_running()
    assert gradus.train(model=MODEL, tasks=ROWS, max_steps=3).outcome == "done"


def test_a_process_of_a_run_starts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCH_VARIABLE, "1")
    with pytest.raises(ConfigError, match="__main__"):
        gradus.train(model=MODEL, tasks=ROWS, max_steps=3)


def test_errors_name_the_keywords_of_the_call_and_keys_of_a_file_as_it_has_them(
    launched: FakeLaunch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"^gradus\.train: lr: -1: must be a number above 0"):
        gradus.train(model=MODEL, tasks=ROWS, reward=score, max_steps=3, lr=-1)
    with pytest.raises(ConfigError, match=r"^gradus\.train: group_size: 1 gives grpo no baseline"):
        gradus.train(model=MODEL, tasks=ROWS, reward=score, max_steps=3, group_size=1)
    config = {"trainer": {"optimizer": {"lr": -1}}}
    with pytest.raises(ConfigError, match=r"trainer\.optimizer\.lr: -1"):
        gradus.train(config, model=MODEL, tasks=ROWS, reward=score, max_steps=3)


def test_what_a_launch_prints_names_keywords_too(launched: FakeLaunch) -> None:
    gradus.train(model=MODEL, tasks=ROWS, reward=score, max_steps=3)
    workload = launched.jobs[-1].workload
    assert isinstance(workload, Steps)
    said = "50% of the replies are cut off: raise sampling.max_completion_tokens. See rewards.py"
    assert workload.in_words(said) == (
        "50% of the replies are cut off: raise max_completion_tokens. See rewards.py"
    )
    assert (
        workload.in_words("--resume continues from step 1") == "resume=True continues from step 1"
    )
    assert workload.in_words("see docs/trainer.lr.md") == "see docs/trainer.lr.md"


def of_answer(reply: str, answer: str) -> float:
    return float(reply == answer)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gradus.train(), "a run has `tasks`"),
        (
            lambda: gradus.train(model=MODEL, reward_funcs=score, train_dataset=ROWS),
            "reward_funcs: gradus calls it reward: reward=...\n"
            "train_dataset: gradus calls it tasks: tasks=...",
        ),
        (lambda: gradus.train(tasks=[{"prompt": "x"}], reward_funcs=score), "calls it reward"),
        (lambda: gradus.evaluate(tasks=ROWS, rewards=score), "did you mean reward?"),
        (lambda: gradus.train(model=MODEL, tasks=ROWS, temprature=1), "did you mean temperature?"),
        (lambda: gradus.train(model=MODEL, tasks=[], max_steps=3), "tasks: there are no rows"),
        (lambda: gradus.train(tasks=ROWS, max_steps=3), "model: missing"),
        (lambda: gradus.train(model=MODEL, tasks=ROWS, max_steps=0), "max_steps: 0: "),
        (lambda: gradus.train(model=MODEL, tasks=ROWS, max_step=3), "did you mean max_steps?"),
        (lambda: gradus.train({"orchestrator": {}}, reward=score), "reward: needs `tasks`"),
        (lambda: gradus.train(model=MODEL, tasks="no-such-id", max_steps=3), "no-such-id"),
        (lambda: gradus.train(model=MODEL, tasks="gone.jsonl", max_steps=0), "max_steps"),
        (lambda: gradus.train(resume="runs/none"), "is not the folder of a run"),
        (lambda: gradus.train(model=MODEL, tasks=ROWS, max_steps=3, resume=True), "set `name`"),
        (lambda: gradus.sft(model=MODEL, data=[]), "data: there are no rows"),
        (lambda: gradus.sft(model=MODEL, data="gone.jsonl"), "gone.jsonl"),
        (lambda: gradus.evaluate(model=MODEL), "env: missing"),
        (lambda: gradus.generate(model=MODEL, tasks=[3]), "row 0: a int"),
        (
            lambda: gradus.train(model=MODEL, tasks=ROWS, reward=of_answer, max_steps=3),
            "'of_answer' asks for 'answer'; it may take, by name: prompt, reply, row, messages, "
            "trace; 'answer' of a row is row['answer']",
        ),
        (
            lambda: gradus.evaluate(model=MODEL, tasks=ROWS, reward={"mine": of_answer}),
            "asks for 'answer'",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    call: Callable[[], object], words: str, launched: FakeLaunch, tmp_path: Path
) -> None:
    with pytest.raises(GradusError) as told:
        call()
    assert words in str(told.value)
    assert list(tmp_path.iterdir()) == []
    assert launched.jobs == []


def test_signals_come_back_to_whoever_had_them(launched: FakeLaunch) -> None:
    before = signal.getsignal(signal.SIGINT)
    gradus.train(model=MODEL, tasks=ROWS, max_steps=3)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_that_is_continued_has_the_config_that_was_written(launched: FakeLaunch) -> None:
    """Deadlines and the like depend on whether they were written."""
    run = gradus.train(model=MODEL, tasks=ROWS, reward=score, max_steps=3, seed=2)
    before = launched.config
    gradus.train(resume=run.path)
    again = launched.config.without_secrets(only_written=True)
    kept = before.without_secrets(only_written=True)
    assert {**again, "output_dir": 0, "name": 0} == {**kept, "output_dir": 0, "name": 0}


def test_a_run_with_variables_of_processes_is_not_continued_without_them(
    launched: FakeLaunch,
) -> None:
    variables = {"trainer.env_vars": {"MY_TOKEN": "canary"}}
    run = gradus.train(model=MODEL, tasks=ROWS, reward=score, max_steps=3, **variables)
    with pytest.raises(ConfigError, match=r"launched with trainer\.env_vars, whose values"):
        gradus.train(resume=run.path)
    gradus.train(launched.config, resume=run.path)
    assert len(launched.jobs) == 2


def test_a_run_with_an_empty_table_of_variables_is_continued(launched: FakeLaunch) -> None:
    own = {"id": "reverse-text", "env_vars": {}}
    keys = {"trainer": {"env_vars": {}}, "orchestrator": {"train": {"env": [own]}}}
    run = gradus.train({**keys, "max_steps": 3, "model": MODEL})
    gradus.train(resume=run.path)
    assert len(launched.jobs) == 2
    assert [*_named_variables({"taskset": {"env_vars": {"A": "recorded"}}})] == []


def test_a_config_of_another_kind_is_refused(launched: FakeLaunch) -> None:
    gradus.train(model=MODEL, tasks=ROWS, reward=score, max_steps=3)
    with pytest.raises(ConfigError, match=r"is of RunConfig, and gradus\.sft takes a SftCon"):
        gradus.sft(launched.config)
    assert len(launched.jobs) == 1
