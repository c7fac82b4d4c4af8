"""Say what a picture shows: a task set for models that see."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf

__all__ = ["PictureTaskset"]


class PictureTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """Worth nothing; only its prompt matters."""


class PictureConfig(vf.TasksetConfig):
    """Which picture."""

    url: str = "data:image/png;base64,AA=="


class PictureTaskset(vf.Taskset[PictureTask, PictureConfig]):
    """A task of words, then one with a picture."""

    def load(self) -> Iterable[PictureTask]:
        """Yield both."""
        image = {"type": "image_url", "image_url": {"url": self.config.url}}
        parts: list[Any] = [{"type": "text", "text": "What is this?"}, image]
        for name, content in (("words", "Say hello."), ("picture", parts)):
            prompt = [vf.UserMessage(content=content)]
            yield PictureTask(vf.TaskData(name=name, prompt=prompt), self.config.task)
