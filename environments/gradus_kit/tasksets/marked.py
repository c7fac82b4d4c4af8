r"""What a reply marks as its answer, in `\boxed{}` or between tags; nothing where a mark is cut.

A reply that opens another box behind its last whole one was about to answer otherwise.
"""

from __future__ import annotations

import re

MAX_ANSWER_CHARACTERS = 300
MAX_READ_CHARACTERS = 20_000
"""From the end of a reply."""
_BOX = re.compile(
    r"\\(?:boxed|fbox)\s*(?=[{\w]|$)"
    r"|\\(?:b(?:o(?:x(?:e(?:d)?)?)?)?|fb(?:o(?:x)?)?)$"
)
"""Also the beginning of one at the end of a text."""


def last_boxed(reply: str) -> str:
    r"""The content of the last `\boxed{...}`; nothing where it is not closed.

    >>> last_boxed(r"So \boxed{\frac{1}{2}}."), last_boxed(r"\boxed{5}, no, \boxed{7")
    ('\\frac{1}{2}', '')
    """
    tail = reply[-MAX_READ_CHARACTERS:].rstrip()
    boxes = list(_BOX.finditer(tail))
    content = _content(tail, boxes[-1].end()) if boxes else None
    return "" if content is None or len(content) > MAX_ANSWER_CHARACTERS else content


def is_cut(reply: str) -> bool:
    r"""Tell whether the last box of a reply is not closed, or an answer tag behind another that is.

    >>> is_cut(r"\boxed{5}, no, \boxed{7"), is_cut("<answer>A</answer>")
    (True, False)
    """
    tail = reply[-MAX_READ_CHARACTERS:].rstrip()
    boxes = list(_BOX.finditer(tail))
    is_box_open = bool(boxes) and _content(tail, boxes[-1].end()) is None
    _, whole, rest = tail.rpartition("</answer>")
    return is_box_open or bool(whole and "<answer>" in rest)


def only_tagged(reply: str, tag: str, most_characters: int) -> str | None:
    """The text between the only pair of tags; None for a reply that has none, or opens several.

    >>> only_tagged("so <answer> 4 </answer>", "answer", 20), only_tagged("<a>1</a> <a>2", "a", 20)
    (' 4 ', None)
    """
    found = re.findall(rf"<{tag}>([^<>]{{0,{most_characters}}})</{tag}>", reply)
    return found[0] if len(found) == 1 == reply.count(f"<{tag}>") else None


def _content(text: str, start: int) -> str | None:
    if text[start : start + 1] != "{":
        return text[start : start + 1] or None
    depth = 0
    # A box longer than any answer is not read to its end, so many open ones cost little.
    for place in range(start, min(len(text), start + MAX_ANSWER_CHARACTERS + 100)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + 1 : place].strip()
    return None
