"""Reading the letter that a reply to a multiple-choice question settles on.

The reading is strict where a reply says nothing else than its letter, lenient where it explains
itself, and silent where it hedges: a reply that names two letters, doubts its own, or ends with
another one that it calls possible has no answer.
Every pattern repeats a bounded number of times on text whose white space is collapsed, so that
the time grows with the length of the reply and no faster.
"""

from __future__ import annotations

import re
import string
from functools import lru_cache

CONCLUSION_CHARS = 200
"""A doubt counts in the last characters of a reply; earlier ones are part of the reasoning."""
_MARKUP = str.maketrans("", "", "*_`$")
_BOXED = re.compile(r"\\(?:boxed|text|mathrm|mathbf)\{ ?([A-Za-z]) ?\}")
_DOUBT = re.compile(
    r"\b(?:not (?:entirely |completely |really |at all |quite )?(?:sure|certain)"
    r"|unsure|uncertain|no idea|(?:do not|don['\u2019]t) know"
    r"|(?:cannot|can['\u2019]t|could not|couldn['\u2019]t) (?:decide|choose|tell|determine|answer)"
    r"|none of (?:the above|them|these)|all of (?:the above|them|these)"
    r"|(?:any|both|neither|either) of (?:the above|them|these))\b",
    re.IGNORECASE,
)
_DENIED = re.compile(
    r"(?:\b(?:not|never|cannot|exclude|excludes|eliminate|eliminates|(?:rule|rules|ruled) out)"
    r"|n['\u2019]t)(?: be)?(?: option)? [(\[]?$",
    re.IGNORECASE,
)
_AFTER_A = frozenset(
    {
        *("is", "was", "because", "since", "as", "would", "must", "can", "should", "seems", "and"),
        *("follows", "fits", "holds", "looks", "being", "or", "gives", "matches", "describes"),
    }
)
"""Words that show a leading "A" to be the option and not the article."""


def read_choice(reply: str, letters: str) -> str | None:
    """The letter of `letters` that a reply settles on, in upper case; None when it settles on none.

    In order: the letter alone; nothing for a hedge; the letter with marks around it, the last
    `answer is A`, a first line or a beginning that gives one (`B. 5 m`, not the first of a list),
    the last `option A`, the last `(A)`, a single letter on the first line, the last letter that
    stands alone; the article "A", the pronoun "I" and letters that are ruled out do not count.

    >>> read_choice("b", "ABCD"), read_choice("The answer is (C).", "ABCD")
    ('B', 'C')
    >>> read_choice("Both A and B are right.", "ABCD") is None
    True
    """
    if is_exact(reply, letters):
        return reply.strip().upper()
    rules = _rules(letters.upper())
    cleaned = _BOXED.sub(r"(\1)", reply.translate(_MARKUP))
    first_line = " ".join(cleaned.lstrip().partition("\n")[0].split())
    text = " ".join(cleaned.split())
    if rules.hedges(text):
        return None
    is_list = len({found[1] for found in rules.listed.finditer(cleaned.lstrip())}) > 1
    return (
        rules.bare(text)
        or rules.last(rules.answered, text)
        or rules.bare(first_line)
        or rules.last(rules.concluded, text)
        or (None if is_list else rules.leading(text))
        or rules.last(rules.stated, text)
        or rules.last(rules.bracketed, text)
        or (None if is_list else rules.single(first_line))
        or rules.last_alone(text)
    )


def is_exact(reply: str, letters: str) -> bool:
    """True for a reply that is one of the letters, in any case, and nothing else."""
    stripped = reply.strip()
    return len(stripped) == 1 and stripped in letters.upper() + letters.lower()


def without_reasoning(reply: str) -> str:
    """What follows the reasoning in the text of a reply; nothing while the reasoning is open.

    Replies of an engine whose renderer separates the reasoning have none in their text.

    >>> without_reasoning("<think>A? No.</think> B"), without_reasoning("<think>B")
    (' B', '')
    """
    public = reply.rpartition("</think>")[2]
    return "" if "<think>" in public else public


@lru_cache(maxsize=32)
def _rules(letters: str) -> _Rules:
    return _Rules(letters)


class _Rules:
    """The patterns for one set of letters."""

    def __init__(self, letters: str) -> None:
        if not letters or not set(letters) <= set(string.ascii_uppercase):
            raise ValueError(f"letters = {letters!r} must be letters from A to Z")
        upper = f"[{letters}]"
        either = f"[{letters}{letters.lower()}]"
        before, after = r"(?<![\w'\u2019-])", r"(?![\w'\u2019-])"
        end = r"(?=[ ]?(?:[.,;:!?)\]]|$))"
        joined = rf"(?: ?(?:,|/|&| or | and | and/or |, or |, and )) ?\(?{upper}{after}"
        self.bracketed = re.compile(rf"\( ?({either}) ?\)(?!{joined})")
        after_word = (
            r"(?: (?:is|was|would be|must be))? ?[:=]? ?(?:option |letter )?[\[(\"']?"
            rf"(?:(?-i:({upper}){after})(?!{joined})|({either}){after}{end})"
        )
        words = r"\b(?:answer|choose|pick|select)\b"
        self.answered = re.compile(words + after_word, re.IGNORECASE)
        self.stated = re.compile(r"\b(?:choice|option)\b" + after_word, re.IGNORECASE)
        self._leading = re.compile(
            r"(?i:the |final |correct |option |letter |it's |it is ){0,4}"
            rf"[\[(\"']?({upper})[\])\"']?(?:[.):]|,? (?:because|since)\b| [-\u2013\u2014] "
            r"| is (?:right|correct)\b)"
        )
        self.listed = re.compile(rf"(?:^|\n|[.!?;] ) *\(?({upper})[.):] ")
        self.concluded = re.compile(
            r"\b(?:so|therefore|thus|hence),? (?:it is |it's |I choose )?(?:the )?(?:option|choice)"
            + after_word,
            re.IGNORECASE,
        )
        self._bare = re.compile(
            rf"(?:option |letter )?[\[(<\"']?({either})[\])>\"']?[.,;:!?)]{{0,3}}", re.IGNORECASE
        )
        self._alone = re.compile(rf"{before}({upper}){after}")
        self._several = re.compile(
            rf"{before}(?:(?i:both|either|neither) \(?{upper}\)?(?: and | or | nor |, | ?/ ?)"
            rf"|\(?{upper}\)?(?: or | and/or | ?/ ?|[?.,;:!]{{1,3}} (?i:or) (?:maybe |perhaps )?))"
            rf"(?:option )?\(?{upper}\)?{after}"
        )
        self._possible = re.compile(
            rf"{before}\(?({upper})\)?{after} (?:(?:is|seems|looks|remains)"
            r" (?:also |still |equally |just as |as )?(?:possible|plausible|likely|conceivable)"
            r"|(?:is|would be) (?:also|equally|just as) (?:right|correct|true|valid|good)"
            r"|(?:could|may|might)(?: also| well| just as well| equally)? (?:be|work|fit|hold)\b)"
            rf"|\b(?i:possibly|perhaps|maybe|alternatively),? (?:option )?\(?({upper}){after}"
            rf"|\b(?:could|may|might)(?: also| well| just as well| equally)? be (?:option )?"
            rf"\(?({upper}){after}",
        )
        self._joined_before = re.compile(rf"{upper}\)?(?:,|/|&| and| or|, and|, or) ?\(?$")
        self._joined_after = re.compile(joined)

    def hedges(self, text: str) -> bool:
        """Whether the conclusion doubts, offers two letters at once, or ends with a second one
        that it calls possible."""
        conclusion = text[-CONCLUSION_CHARS:]
        if _DOUBT.search(conclusion) or self._several.search(conclusion):
            return True
        places: list[int] | None = None
        for found in self._possible.finditer(conclusion):
            places = self._places(text) if places is None else places
            letter, end = found[1] or found[2] or found[3], found.end()
            before = {text[p] for p in places if p < len(text) - len(conclusion) + end}
            after = {conclusion[end:][p] for p in self._places(conclusion[end:])}
            if before - {letter} and not after - {letter}:
                return True
        return False

    def bare(self, text: str) -> str | None:
        """The letter of a text that is a letter with marks around it."""
        found = self._bare.fullmatch(text)
        return found[1].upper() if found else None

    def last(self, pattern: re.Pattern[str], text: str) -> str | None:
        """The letter of the last match: who corrects himself means the correction."""
        letter = None
        for found in pattern.finditer(text):
            if not _is_denied(text, found.start(found.lastindex or 0)):
                letter = found[found.lastindex or 0]
        return letter.upper() if letter else None

    def leading(self, text: str) -> str | None:
        """The letter that a text begins with and goes on to explain."""
        found = self._leading.match(text)
        return found[1] if found else None

    def single(self, line: str) -> str | None:
        """The letter of a line on which only one stands alone."""
        found = {line[place] for place in self._places(line)}
        return found.pop() if len(found) == 1 else None

    def last_alone(self, text: str) -> str | None:
        """The last letter that stands alone, unless it is one of an enumeration."""
        places = self._places(text)
        if not places:
            return None
        place = places[-1]
        around = text[max(0, place - 12) : place], text[place + 1 : place + 16]
        if self._joined_before.search(around[0]) or self._joined_after.match(around[1]):
            return None
        return text[place]

    def _places(self, text: str) -> list[int]:
        places = (found.start() for found in self._alone.finditer(text))
        return [p for p in places if not _is_word(text, p) and not _is_denied(text, p)]


def _is_denied(text: str, place: int) -> bool:
    """Whether the words before this place rule the letter out."""
    return _DENIED.search(text, max(0, place - 24), place) is not None


def _is_word(text: str, place: int) -> bool:
    """Whether the letter at this place is the article "A" or the pronoun "I"."""
    if text[place] == "I":
        return True
    if text[place] != "A" or text[place + 1 : place + 2] != " ":
        return False
    begins = text[max(0, place - 2) : place].rstrip()[-1:] in ("", ".", "!", "?", ":", '"')
    next_word = text[place + 2 : place + 40].partition(" ")[0]
    return begins and next_word[:1].isalpha() and next_word.strip(".,;:!?") not in _AFTER_A
