"""The images that a worker's conversations show the engine: which may be, which it has, and how a
prompt names them.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from gradus.errors import ProtocolError
from gradus.wire.images import bytes_of, open_image

REMEMBERED_IMAGES = 4_096
"""Images that were checked, and those that one engine was sent."""
Part = Mapping[str, Any]
"""One of a request's `content_parts`."""


_leaves: ContextVar[bool] = ContextVar("leaves", default=False)
"""Whether what is being rendered leaves its images to the engine."""


def leave_images_to_engine() -> None:
    """Let prompts of Gemma 4 have one token for an image, as those of other models have; in its
    place vLLM puts as many as the image has, and those around them."""
    kind: Any = importlib.import_module("renderers.gemma4").Gemma4Renderer
    if getattr(kind, "supports_process_multimodal", False):
        return

    def told(write: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(write)
        def write_told(*given: Any, process_multimodal: bool = True, **options: Any) -> Any:
            before = _leaves.set(not process_multimodal)
            try:
                return write(*given, **options)
            finally:
                _leaves.reset(before)

        return write_told

    emit = kind._emit_image

    @functools.wraps(emit)
    def emit_image(renderer: Any, written: Any, *given: Any, assistant_body: bool) -> None:
        if not _leaves.get():
            emit(renderer, written, *given, assistant_body=assistant_body)
            return
        written.special(renderer._image, is_sampled=assistant_body, is_content=True)

    kind.render, kind.bridge_to_next_turn = told(kind.render), told(kind.bridge_to_next_turn)
    kind._emit_image, kind.supports_process_multimodal = emit_image, True


class CheckedImages:
    """Knows the images that engine and trainer can read; each is decoded once, on a thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, None] = OrderedDict()
        self.placeholders: set[int] = set()
        """Tokens that stand for an image, one each, in a prompt."""

    async def named(self, parts: Sequence[Part], token_ids: Sequence[int]) -> list[Part]:
        """The images of a request, each with a name of its own as its `uuid`; ProtocolError for
        those that the model must not be shown, and for another number of them than its prompt has
        places."""
        named: list[Part] = []
        for number, part in enumerate(parts):
            try:
                if part["type"] != "image_url":
                    text = f"it is of the type {part['type']!r}; only images are taken"
                    raise ProtocolError(text)
                name = await asyncio.to_thread(self._check, part["url"])
            except ProtocolError as error:
                raise ProtocolError(f"image {number} of the conversation: {error}") from error
            named.append({**part, "uuid": name})
        places = sum(token in self.placeholders for token in token_ids)
        if self.placeholders and places != len(parts):
            raise ProtocolError(
                f"the conversation shows {len(parts)} images, and {places} tokens stand for one: "
                "the policy wrote such a token itself, and cannot read on after it"
            )
        return named

    def _check(self, url: str) -> str:
        """The name of an image that may be shown."""
        name = hashlib.sha256(url.encode()).hexdigest()
        if name not in self._known:
            open_image(bytes_of(url))
            _remember(self._known, name)
        return name


class SentImages:
    """Knows what each engine was sent, and can then be asked by its name.

    vLLM keeps by it what its processor made of an image, as long as its cache has room.
    """

    def __init__(self) -> None:
        self._sent: dict[str, OrderedDict[str, None]] = {}

    def shorten(self, parts: Sequence[Part], address: str) -> list[Part]:
        """The images of a request to an engine, without the bytes that it was sent before."""
        sent = self._sent.get(address, ())
        return [
            {key: it[key] for key in it if key != "url" or it["uuid"] not in sent} for it in parts
        ]

    def note(self, parts: Sequence[Part], address: str) -> None:
        """The engine has answered to a request with these."""
        for part in parts:
            _remember(self._sent.setdefault(address, OrderedDict()), part["uuid"])

    def forget(self, parts: Sequence[Part], address: str) -> None:
        """The engine has refused one."""
        for part in parts:
            self._sent.get(address, OrderedDict()).pop(part["uuid"], None)


def _remember(names: OrderedDict[str, None], name: str) -> None:
    """The newest last; the oldest goes where there are too many."""
    names[name] = None
    names.move_to_end(name)
    if len(names) > REMEMBERED_IMAGES:
        names.popitem(last=False)
