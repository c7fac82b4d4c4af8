"""The trainer's turn on a GPU that it shares with the engine: see `inference/gpu/turns.py`.

Before a step learns, the engine is asked to leave the GPU, once it serves the version that the step
trains. Once the new version is copied to main memory, all ranks give their memory back and the
engine is asked to return. Of vLLM on a GPU this is not shown yet.
"""

from __future__ import annotations

import contextlib
import gc
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from gradus.errors import DeadlineError, FencedError, GradusError, ProcessError, ProtocolError
from gradus.heartbeat import busy
from gradus.log import get_logger
from gradus.run.paths import RunDirectory
from gradus.run.ready import InferenceReady, read_ready, read_token
from gradus.trainer.distributed import World
from gradus.wire.inference import TurnRequest, TurnResult, is_stale

logger = get_logger(__name__)
ASK_AGAIN_SECONDS = 10.0
"""How long a request is sent again whose connection broke; both may arrive twice."""
_PAUSE_SECONDS = 0.2
_PROXY_STATUSES = (502, 503)
_ANSWER_SECONDS = 330.0
"""What an answer may take beyond the wait that it was asked for: the engine moves its memory."""


@dataclass(frozen=True)
class GpuTurns:
    """One rank's part in taking turns; rank 0 asks, and the others wait for it."""

    run_dir: RunDirectory
    term: int
    world: World
    wait_seconds: float
    """Longest wait for the version that is trained to be served."""
    sleep_seconds: float
    """Longest that the engine may sleep."""

    @contextmanager
    def taken(self, step: int, settle: Callable[[], None] | None = None) -> Iterator[None]:
        """The GPU without the engine, for learning version `step` and gathering the next; version 0
        is served from the beginning on.

        `settle` returns when the version before is published, or raises why it cannot be: the
        engine would wait for it in vain.

        DeadlineError when the engine did not leave in time, FencedError under a newer term,
        ProcessError when it is gone, ProtocolError for any other refusal.
        """
        if settle is not None:
            settle()
        self.world.first_rank_does(partial(self._ask, "sleep", step))
        try:
            yield
        except BaseException:
            # No collective: other ranks may be gone. Whoever watches this process ends the run;
            # until then the engine should answer.
            if self.world.is_first:
                self._free()
                with contextlib.suppress(GradusError):
                    self._ask("wake", step)
            raise
        self._free()
        # The turn of rank 0 starts when all ranks have come here and freed what they had.
        self.world.all_agree(True)
        self.world.first_rank_does(partial(self._ask, "wake", step))

    def _free(self) -> None:
        """Give back what torch keeps for later; masters and moments stay."""
        if self.world.device.type != "cuda":
            return
        gc.collect()
        torch.cuda.empty_cache()
        kept = torch.cuda.memory_reserved(self.world.device) / 2**30
        logger.debug("keeps %.1f GiB of the GPU between steps", kept)

    def _ask(self, what: str, step: int) -> None:
        request = TurnRequest(
            run_id=self.run_dir.root.name,
            term=self.term,
            version=step,
            wait_seconds=self.wait_seconds,
            sleep_seconds=self.sleep_seconds,
        )
        result = self._asked(what, msgspec.json.encode(request))
        if what == "wake" and not result.was_in_time:
            logger.warning(
                "step %d was longer than %g s: the engine came back to the GPU before it was done",
                step,
                self.sleep_seconds,
            )
        logger.info("engine %s: %.2f s", "asleep" if what == "sleep" else "awake", result.seconds)

    def _asked(self, what: str, body: bytes) -> TurnResult:
        until = time.monotonic() + ASK_AGAIN_SECONDS
        while True:
            try:
                return self._post(what, body)
            except ProcessError as error:
                if time.monotonic() >= until:
                    raise
                logger.info("%s; asked again", error)
            time.sleep(_PAUSE_SECONDS)

    def _post(self, what: str, body: bytes) -> TurnResult:
        base_url = read_ready(self.run_dir, "inference", InferenceReady).base_url
        request = urllib.request.Request(
            f"{base_url}/gradus/{what}",
            data=body,
            headers={
                "Authorization": f"Bearer {read_token(self.run_dir.admin_token)}",
                "Content-Type": "application/json",
            },
        )
        limit = (self.wait_seconds if what == "sleep" else 0.0) + _ANSWER_SECONDS
        # A proxy of the user's shell must not see the run's token.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with (
                busy(f"waits for the engine to {what}", limit),
                opener.open(request, timeout=limit) as response,
            ):
                return msgspec.json.decode(response.read(), type=TurnResult)
        except urllib.error.HTTPError as error:
            raise _refusal(what, error) from error
        except TimeoutError as error:
            raise DeadlineError(
                f"inference did not answer {what!r} in {limit:g} s; see its log"
            ) from error
        except ValueError as error:
            raise ProtocolError(f"inference sent no valid TurnResult: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            raise ProcessError(
                f"inference: {what!r} failed ({error!r}); the server may have ended, see its log"
            ) from error


def _refusal(what: str, error: urllib.error.HTTPError) -> GradusError:
    """The named error of an answer that is no 200."""
    answer = error.read()
    text = answer[:500].decode(errors="replace")
    message = f"inference refused {what!r} ({error.code}): {text}"
    if error.code in _PROXY_STATUSES:
        return ProcessError(message)
    if is_stale(answer):
        return FencedError(message)
    if error.code == 504:
        return DeadlineError(f"{message}. An evaluation may hold the version back")
    return ProtocolError(message)
