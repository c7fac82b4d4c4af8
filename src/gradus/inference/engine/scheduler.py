"""vLLM's scheduler as gradus runs it in the engine's process: whole replies, steps worth taking.

vLLM hands every sampled token to the server, which decodes it, looks up its request and keeps it
until the reply ends. In a run no reply is read before its end, so here the tokens wait where
they were sampled and cross to the server once.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import LogprobsLists

from gradus.inference.engine.experts import (
    ExpertSlots,
    StepExperts,
    records_experts,
    slots_group,
)
from gradus.processes.child import show_stacks
from gradus.wire.episode import POLICY_VERSIONS
from gradus.wire.versions import VersionRuns, add_run

HOLD_SECONDS = 1.0
"""Sampled tokens are sent at least this often, so that a long reply is seen to grow."""
STREAM_SECONDS = 0.05
"""The same of a reply that is read while it grows; its first token is sent at once."""
STATS_SECONDS = 0.05
"""The load is sent at least this often while the engine computes, and when something ends."""
LONGEST_WAIT_SECONDS = 0.01
_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)
FEW_REQUESTS = 64
"""With this many requests a step costs its tokens, not its fixed price."""
ARRIVING_SECONDS = 0.05
"""Requests arrive while the last one came no longer ago than this."""
TOKENS_ONLY_PREFIX = "generate-tokens-"
"""How vLLM's `/inference/v1/generate` names its requests; their text is never looked at."""
_FINAL = RequestOutputKind.FINAL_ONLY


class StepPace:
    """How long the next step should wait for requests that are about to arrive (pure).

    A step of few tokens costs almost what a step of many does. While requests trickle in, a CPU
    engine that steps as often as it can burns a core on steps of a few tokens, which the
    environments and the trainer need. A wait as long as the last step took lets about twice as many
    requests share the next one. Without arrivals, at the end of a batch, nothing waits.

    >>> pace = StepPace()
    >>> pace.arrived(now=1.0)
    >>> pace.stepped(seconds=0.004)
    >>> pace.wait_seconds(now=1.01, num_requests=3), pace.wait_seconds(now=1.2, num_requests=3)
    (0.004, 0.0)
    """

    def __init__(self) -> None:
        self._last_arrival = float("-inf")
        self._step_seconds = 0.0

    def arrived(self, *, now: float) -> None:
        self._last_arrival = now

    def stepped(self, *, seconds: float) -> None:
        self._step_seconds = seconds

    def wait_seconds(self, *, now: float, num_requests: int) -> float:
        """Zero where a wait gains nothing."""
        if num_requests >= FEW_REQUESTS or now - self._last_arrival > ARRIVING_SECONDS:
            return 0.0
        return min(self._step_seconds, LONGEST_WAIT_SECONDS)


class HeldReplies:
    """Owns the tokens of replies that are not finished."""

    def __init__(self) -> None:
        self.version: int | None = None
        """Of the weights that sample; None where nobody counts versions."""
        self._held: dict[str, tuple[float, list[EngineCoreOutput]]] = {}
        self._versions: dict[str, VersionRuns] = {}

    def take(
        self, output: EngineCoreOutput, *, now: float, is_streamed: bool = False
    ) -> EngineCoreOutput | None:
        """The reply so far when it ended or is due, None while it is held.

        Each part tells the versions of all tokens up to its end, in the one field that vLLM passes
        on from its scheduler to the JSON of an answer.
        """
        name, is_last = output.request_id, output.finish_reason is not None
        is_due = is_last or (is_streamed and name not in self._versions)
        runs = self._versions.setdefault(name, [])
        if self.version is not None:
            add_run(runs, self.version, len(output.new_token_ids))
        since, parts = self._held.setdefault(name, (now, []))
        parts.append(output)
        if not is_due and now - since < (STREAM_SECONDS if is_streamed else HOLD_SECONDS):
            return None
        del self._held[name]
        told = merged(parts)
        if runs:
            told.kv_transfer_params = {**(told.kv_transfer_params or {}), POLICY_VERSIONS: [*runs]}
        if is_last:
            del self._versions[name]
        return told

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop replies that no client waits for."""
        for request_id in request_ids:
            self._held.pop(request_id, None)
            self._versions.pop(request_id, None)


def merged(parts: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Consecutive outputs of one request as one; the last of them tells how it ended."""
    last = parts[-1]
    if len(parts) == 1:
        return last
    last.new_token_ids = [token for part in parts for token in part.new_token_ids]
    pieces = [part.new_logprobs for part in parts if part.new_logprobs is not None]
    if pieces:
        # A step has as many columns as the request that asks for the most of them.
        width = min(piece.logprobs.shape[1] for piece in pieces)
        last.new_logprobs = LogprobsLists(
            np.concatenate([piece.logprob_token_ids[:, :width] for piece in pieces]),
            np.concatenate([piece.logprobs[:, :width] for piece in pieces]),
            np.concatenate([piece.sampled_token_ranks for piece in pieces]),
        )
    routed = [part.routed_experts for part in parts if part.routed_experts is not None]
    last.routed_experts = np.concatenate(routed) if routed else None
    last.events = [event for part in parts for event in part.events or ()] or None
    last.prefill_stats = next((p.prefill_stats for p in parts if p.prefill_stats), None)
    return last


class WholeReplies(Scheduler):
    """Sends a reply once it is finished, where the client asked for no more."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        show_stacks()
        _tell_scheduler_versions()
        self._replies = HeldReplies()
        self._stats_sent = float("-inf")
        self._experts: ExpertSlots | None = None
        self._experts_of: dict[str, Any] = {}
        self._experts_end: dict[str, int] = {}
        if records_experts(self.vllm_config):
            cache, self._group = self.kv_cache_config, slots_group(self.kv_cache_config)
            block_tokens = cache.kv_cache_groups[self._group].kv_cache_spec.block_size
            self._experts = ExpertSlots(cache.num_blocks * block_tokens, block_tokens)

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any
    ) -> dict[int, EngineCoreOutputs]:
        """As vLLM's, without the outputs that are held."""
        if model_runner_output.logprobs is not None:
            # Held longer than the buffers of the step may live.
            model_runner_output.logprobs = _owned(model_runner_output.logprobs)
        step = StepExperts.taken_from(model_runner_output)
        if self._experts is not None and step is not None:
            self._experts.note(step)
        kinds = {name: self._kind_of(name) for name in scheduler_output.num_scheduled_tokens}
        messages = super().update_from_output(scheduler_output, model_runner_output)
        now = time.monotonic()
        for message in messages.values():
            if self._experts is not None:
                self._tell_experts(self._experts, message.outputs)
            message.outputs = [
                told
                for output in message.outputs
                if (
                    told := output
                    if (kind := kinds.get(output.request_id, _FINAL)) is None
                    else self._replies.take(output, now=now, is_streamed=kind != _FINAL)
                )
                is not None
            ]
        return {index: message for index, message in messages.items() if _says_something(message)}

    def note_version(self, version: str) -> None:
        """Other weights sample from now on. The engine is paused: no step is on its way."""
        self._replies.version = int(version) if version.isdecimal() else None

    def _kind_of(self, request_id: str) -> RequestOutputKind | None:
        """Whether a reply is read at its end or while it grows; None where each token is."""
        request = self.requests.get(request_id)
        asked = None if request is None else request.sampling_params
        is_held = (
            asked is not None
            and (asked.output_kind == _FINAL or request_id.startswith(TOKENS_ONLY_PREFIX))
            and asked.prompt_logprobs is None
            # The server looks for stop strings in the text of every token.
            and not asked.stop
            and not self.return_sampling_mask
            and self.aux_output_connector is None
        )
        return asked.output_kind if asked is not None and is_held else None

    def _tell_experts(self, experts: ExpertSlots, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            request: Any = self.requests.get(output.request_id)
            if request is not None and request.sampling_params.stop:
                # The server, which reads its text, may end it with this token.
                self._find_experts(experts, request)
            output.routed_experts = self._experts_of.pop(output.request_id, None)

    def _find_experts(self, experts: ExpertSlots, request: Any) -> None:
        """Of those of its tokens whose experts were not told yet."""
        name = request.request_id
        start = self._experts_end.get(name, request.sampling_params.routed_experts_prompt_start)
        # No forward followed the last token.
        end = max(start, request.num_tokens - 1)
        blocks = self.kv_cache_manager.get_block_ids(name)[self._group]
        found = experts.of_blocks(blocks, start, end)
        if found is not None:
            self._experts_of[name], self._experts_end[name] = found, end

    def _free_request(self, request: Any, *args: Any, **options: Any) -> Any:
        """As vLLM's; what its tokens were routed by is read before others take its place."""
        if self._experts is not None and request.get_finished_reason() in _WHOLE:
            self._find_experts(self._experts, request)
        self._experts_end.pop(request.request_id, None)
        return super()._free_request(request, *args, **options)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """As vLLM's, and what was held of them is forgotten."""
        ended = super().finish_requests(request_ids, finished_status)
        names = [request.request_id for request in ended]
        self._replies.forget(names)
        for name in names:
            self._experts_of.pop(name, None)
        return ended

    def make_stats(self, *args: Any, **options: Any) -> Any:
        """As vLLM's; None where the last are fresh and nothing has finished since."""
        now = time.monotonic()
        is_idle = not any(self.get_request_counts())
        if not (self.finished_req_ids or is_idle) and now - self._stats_sent < STATS_SECONDS:
            return None
        self._stats_sent = now
        return super().make_stats(*args, **options)


class PacedReplies(WholeReplies):
    """`WholeReplies` of a CPU engine, which shares its cores with the rest of the run."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._pace = StepPace()
        self._step_began = 0.0

    def add_request(self, request: Any) -> None:
        self._pace.arrived(now=time.monotonic())
        super().add_request(request)

    def schedule(self, *args: Any, **options: Any) -> Any:
        """As vLLM's, after a wait for what arrives."""
        count = sum(self.get_request_counts())
        wait = self._pace.wait_seconds(now=time.monotonic(), num_requests=count)
        if wait > 0.0:
            time.sleep(wait)
        self._step_began = time.monotonic()
        return super().schedule(*args, **options)

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any
    ) -> dict[int, EngineCoreOutputs]:
        self._pace.stepped(seconds=time.monotonic() - self._step_began)
        return super().update_from_output(scheduler_output, model_runner_output)


class OverlappedReplies(WholeReplies, AsyncScheduler):
    """`WholeReplies` for an engine that schedules a step while the one before still runs."""


def _tell_scheduler_versions() -> None:
    """Let the scheduler hear of new weights where vLLM's engine notes their version.

    Can go when vLLM tells with a token which weights sampled it.
    """
    core_class: Any = EngineCore
    note = core_class.set_weight_version
    if hasattr(note, "__wrapped__"):
        return

    @functools.wraps(note)
    def note_and_tell(core: Any, weight_version: str) -> None:
        note(core, weight_version)
        if isinstance(core.scheduler, WholeReplies):
            core.scheduler.note_version(weight_version)

    core_class.set_weight_version = note_and_tell


def _owned(logprobs: LogprobsLists) -> LogprobsLists:
    return logprobs._replace(
        logprob_token_ids=logprobs.logprob_token_ids.copy(),
        logprobs=logprobs.logprobs.copy(),
        sampled_token_ranks=logprobs.sampled_token_ranks.copy(),
    )


def _says_something(message: EngineCoreOutputs) -> bool:
    return bool(
        message.outputs
        or message.scheduler_stats
        or message.finished_requests
        or message.utility_output
    )
