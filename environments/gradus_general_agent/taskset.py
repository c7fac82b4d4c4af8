"""The taskset `general-agent`: answer a question about files in a container, with a shell."""

from __future__ import annotations

import asyncio
import itertools
import shlex
from collections.abc import Iterable

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.errors import SandboxError

from gradus_general_agent.jobs import jobs
from gradus_kit.tasksets.holdout import HoldoutKeys
from gradus_swe_sandbox.shell import GRACE_SECONDS, ShellHarness, ShellHarnessConfig, is_there
from gradus_swe_sandbox.taskset import LOCAL_IMAGE, shell_call, unpack

FOLDER = "/app/job"
ANSWER = "/app/answer.txt"
INSTRUCTION = (
    "You work with a shell. Look at the files, then write the answer, and nothing else, into "
    f"{ANSWER}. When it is written, say so without calling a tool."
)
_MAX_ANSWER_BYTES = 1000


class GeneralAgentHarnessConfig(ShellHarnessConfig):
    """The keys of the shell harness."""

    id: str = "gradus-general-agent"
    """Id under which verifiers imports it."""


class GeneralAgentHarness(ShellHarness, vf.Harness[GeneralAgentHarnessConfig]):
    """A chat with a shell in the container of the job."""


class GeneralAgentConfig(vf.TasksetConfig, HoldoutKeys):
    """Which jobs."""

    num_tasks: int = Field(200, ge=1)
    """Number of jobs."""
    seed: int = 0
    """Seed of the files and questions."""
    image: str | None = LOCAL_IMAGE
    """Image of the container; any with a shell and tar. None means that of the runtime."""
    instruction: str | None = INSTRUCTION
    """System prompt. None means that the model sees only the question."""


class JobData(vf.TaskData):
    """One job."""

    answer: str
    """What the file must hold."""
    files: dict[str, str]
    """Text by path."""


class JobTask(vf.Task[JobData, vf.State, vf.TaskConfig]):
    """One job in a fresh container."""

    NEEDS_CONTAINER = True

    def gold_replies(self) -> list[str]:
        """The answer, written by one command."""
        return [shell_call(f"echo {shlex.quote(self.data.answer)} > {ANSWER}"), "Done."]

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:  # noqa: ARG002
        await unpack(runtime, self.data.files, FOLDER)

    @vf.reward
    async def answered(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        """1 when the file holds the answer."""
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                written = await runtime.read(ANSWER, max_bytes=_MAX_ANSWER_BYTES)
        except (SandboxError, TimeoutError):
            # Nothing there, far more than an answer, or a container in which nothing runs.
            if not await is_there(runtime):
                raise
            trace.record_metric("wrote_answer", 0.0)
            return 0.0
        trace.record_metric("wrote_answer", 1.0)
        return float(written.decode("utf-8", "replace").strip() == self.data.answer)


class GeneralAgentTaskset(vf.Taskset[JobTask, GeneralAgentConfig]):
    """The jobs in turn."""

    def load(self) -> Iterable[JobTask]:
        """Yield the jobs of the configured side."""
        config = self.config
        kept = (job for job in jobs(seed=config.seed) if config.keeps(job.name))
        for job in itertools.islice(kept, config.num_tasks):
            data = JobData(
                name=job.name,
                prompt=f"The files are in {FOLDER}. {job.question}",
                system_prompt=config.instruction,
                answer=job.answer,
                files=job.files,
                image=config.image,
                workdir=FOLDER,
            )
            yield JobTask(data, config.task)
