"""Extension of mkdocstrings: examples of docstrings (`>>> ...`) are shown as code."""

from __future__ import annotations

import re

import griffe

_EXAMPLE = re.compile(r"^>>> (?:.|\n(?!\n))*", re.MULTILINE)


class Examples(griffe.Extension):
    """Fences each block that begins with `>>>`, up to the next empty line."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is None:
            return
        text = obj.docstring.value.replace("  # doctest: +SKIP", "")
        obj.docstring.value = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", text)
