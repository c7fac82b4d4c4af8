"""Reading the letter that a reply to a multiple-choice question settles on.

What a reply states counts, and of two statements the later one; without a statement, what it begins
with, the only letter that it names, or the letter that it ends with. A reply that names several
letters and states none, doubts its own, or ends with another one that it calls possible has no
answer, nor has one whose last box or tag is cut: a reply that cannot be read is worth nothing, and
no guess pays it.
Every pattern repeats a bounded number of times on text whose white space is collapsed, so that
the time grows with the length of the reply and no faster.
"""

from __future__ import annotations

import re
import string
from functools import lru_cache

from gradus_kit.tasksets.marked import is_cut

_READ_CHARS = 20_000
"""From the end of a reply."""
CONCLUSION_CHARS = 200
"""A doubt counts in the last characters of a reply; earlier ones are part of the reasoning."""
_CLAUSE_CHARS = 48
"""How far before a letter the words of its clause are looked at."""
_MARKUP = str.maketrans("", "", "*_`$")
_MARKED = re.compile(
    r"\\boxed\{(?:\\\w+\{)? ?\(?([A-Za-z])\)? ?\}{1,2}|<answer> ?\(?([A-Za-z])\)? ?</answer>"
)
_DOUBT = re.compile(
    r"\b(?:not (?:entirely |completely |really |at all |quite )?(?:sure|certain)"
    r"|unsure|uncertain|no idea|(?:do not|don['\u2019]t) know(?! the (?!answer|option|letter))"
    r"|(?:cannot|can['\u2019]t|could not|couldn['\u2019]t) (?:(?:decide|choose|determine|answer)\b"
    r"|tell(?=[.,;!?]|$)))\b(?: (?:about|of) (?:option )?\(?(?-i:([A-Z])\b))?",
    re.IGNORECASE,
)
_DENIED = re.compile(
    r"(?:(?:\b(?:not|never|cannot|excludes?|eliminates?|reject(?:s|ed|ing)?|rule[sd]? out"
    r"|except|(?:anything|all|nothing) but)|n['\u2019]t)(?: be| choose| pick| select| answer| say"
    r"| (?:think|believe)(?: that)?(?: it(?: is|['\u2019]s)| the answer is)?)?"
    r"|\b(?:doubts?|unlikely|hardly|no way)\b[^.,;:!?]{0,28})(?: option)? [(\[]?$",
    re.IGNORECASE,
)
_REFUTED = re.compile(
    r"[)\]\"']?,?(?: which)? (?:(?:(?:is|are|was)(?:n['\u2019]t)?|would be) (?:not|never|wrong"
    r"|incorrect|false|out|excluded|impossible|absurd|too)\b|(?:is|are|was)n['\u2019]t\b"
    r"|(?:does|do)(?: not\b|n['\u2019]t\b)|(?:cannot|can['\u2019]t|fails|unless)\b)",
    re.IGNORECASE,
)
_SUPPOSED = re.compile(
    r"\b(?:if|suppose|supposing|assume|assuming|unless|whether|were|wrong|incorrect|worst|bad"
    r"|some|many|others|people|they|opponent\w*|claims?|might (?:think|say|guess))\b[^.,;:!?]*$",
    re.IGNORECASE,
)
"""A clause that supposes an answer, says another's, or names a wrong one, states none."""
_AFTER_A = frozenset(
    {
        *("is", "was", "because", "since", "as", "would", "must", "can", "should", "seems", "and"),
        *("follows", "fits", "holds", "looks", "being", "or", "gives", "matches", "describes"),
        *("works", "makes", "will", "definitely", "has", "fails", "through", "does", "isn't"),
    }
)
"""Words that show a leading "A" to be the option and not the article."""


def read_choice(reply: str, letters: str) -> str | None:
    """The letter of `letters` that a reply settles on, in upper case; None when it settles on none.

    In order: the letter alone; a last line that is one; the last statement (`the answer is A`,
    `A is correct`, `so it is A`, a box); a first line that is a letter; a beginning that gives one
    (`B. 5 m`, not the first of a list); the only letter; one that the last sentence ends with. The
    article "A", the pronoun "I" and letters that are ruled out do not count.

    >>> read_choice("b", "ABCD"), read_choice("The answer is (C).", "ABCD")
    ('B', 'C')
    >>> read_choice("Both A and B are right.", "ABCD") is None
    True
    """
    if is_exact(reply, letters):
        return reply.strip().upper()
    if is_cut(reply):
        return None
    rules = _rules(letters.upper())
    marked = _MARKED.sub(lambda found: f" answer: {found[1] or found[2]}. ", reply[-_READ_CHARS:])
    cleaned = marked.translate(_MARKUP).strip()
    ends = cleaned.partition("\n")[0], cleaned.rpartition("\n")[2]
    first, last = (" ".join(line.split()) for line in ends)
    text = " ".join(cleaned.split())
    letter = (
        rules.bare(last)
        or rules.stated(text)
        or (None if rules.is_list(cleaned) else rules.bare(first) or rules.leading(text))
        or rules.only(text)
        or rules.closing(last)
    )
    return None if letter is None or rules.hedges(text, letter) else letter


def is_exact(reply: str, letters: str) -> bool:
    """True for a reply that is one of the letters, in any case, and nothing else."""
    stripped = reply.strip()
    return len(stripped) == 1 and stripped in letters.upper() + letters.lower()


def without_reasoning(reply: str) -> str:
    """Cut the reasoning off the text of a reply; nothing is left while the reasoning is open.

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
        self._first = letters[0]
        upper = f"(?-i:[{letters}])"
        either = f"[{letters}{letters.lower()}]"
        before, after = r"(?<![\w-])(?<!\w['\u2019])", r"(?![\w-]|['\u2019]\w)"
        stop = r"(?=\)|[\]\"']? ?(?:[.,;:!?(<]|(?:because|since|as)\b|$))"
        clause = r"(?! (?:is|are|being|has|would|was|fails|does|cannot)\b)"
        joined = (
            r"(?!\)?[\"']?(?: ?(?:[,/&|+;=\u2013-]|\.{2,3} or is it)|,? \(?(?:or|and|and/or)"
            rf"| (?:through|to)) ?\(?(?:option )?{upper}{after}{clause})"
        )
        named = r" ?(?:(?:option|choice|letter) )?[\[(\"']?"
        closed = rf"({either}){after}{stop}{joined}"
        adverbs = (
            r"(?: (?:clearly|then|therefore|thus|hence|indeed|definitely|simply|still),?){0,2}"
        )
        answer = (
            r"(?:answer|choice|option|one|letter|result|solution|conclusion|correct|final|truth)"
        )
        be, it_is = (
            r"(?:is|was|(?:must|would|should|has to) be)",
            r"(?:it is|it['\u2019]s|it must be)",
        )
        statements = (
            # The answer to the question is clearly B; Result: B.
            rf"\b{answer}(?:,? (?!is\b|was\b|not\b)[\w'\u2019]+){{0,4}}?,? ?(?:{be}|[:=])"
            rf",?{adverbs}{named}(?:({upper}){after}{joined}|{closed})",
            # Answer B; I choose B.
            rf"\b(?:answer|choose|pick|select){named}(?:({upper}){after}{joined}|{closed})",
            # B is the correct one.
            rf"{before}({upper})\)?{after} (?:is|must be|has to be)(?: \w+ly)?(?: the)?(?: \w+ly)? "
            r"(?:(?:only )?(?:correct|right|best)|answer)\b(?! (?:about|if|in|only|that|when)\b)"
            r"(?![^.,;!]{0,40}\?)",
            # So it is B; that leaves B; I am going with B.
            r"\b(?:so|therefore|thus|hence|actually|rather|leaves|leaving|(?:go|going|went) with"
            r"|say|conclude|think"
            rf"|choosing|picking|{it_is}|answer must be)[,:]?(?: (?:{it_is}|that is|we get|I choose"
            rf"|I pick|only|the|answer is)){{0,3}}{named}{closed}",
        )
        self._statements = [re.compile(pattern, re.IGNORECASE) for pattern in statements]
        self._leading = re.compile(
            r"(?i:the |final |correct |option |letter |it's |it is ){0,4}"
            rf"(?:[\[(\"']?({upper})[\])\"']?{joined}"
            r"(?:[.):,]|,? (?:because|since)\b| [-\u2013\u2014] | ?[=\u2192]| \([-\d])"
            rf"|({either})\) )"
        )
        self._listed = re.compile(
            rf"(?:^|[.!?;,] |\n)[-\u2022\d.) ]{{0,6}}(?i:option )?\(?({upper})\)?"
            r"(?: ?[.):]| [-\u2013\u2014] | ?\n)"
        )
        self._joined = re.compile(rf"{upper}\)?(?:[,/&;]|,? and|,? or) ?\(?$")
        self._bare = re.compile(
            rf"(?:option |letter )?[\[(<\"']?({either})[\])>\"']?[.,;:!?)]{{0,3}}", re.IGNORECASE
        )
        self._alone = re.compile(rf"{before}(?:{upper}{after}|(?<=\(){either}(?=\)))")
        self._compile_doubts(upper, before, after)

    def _compile_doubts(self, upper: str, before: str, after: str) -> None:
        self._several = re.compile(
            rf"{before}(?:(?i:both|either) \(?({upper})\)?(?: and | or |, | ?/ ?)"
            rf"|\(?({upper})\)?(?: or | and/or | ?/ ?"
            r"|[?.,;:!]{1,3} (?i:or) (?:maybe |perhaps )?))"
            rf"(?:option )?\(?({upper})\)?{after}"
        )
        right = r"(?:right|correct|true|valid|good|it|the answer|the one)"
        could = r"(?:could|may|might)(?: also| well| just as well| equally)?"
        self._possible = re.compile(
            rf"{before}\(?({upper})\)?{after} (?:(?:is|seems|looks|remains)"
            r" (?:also |still |equally |just as |as )?(?:possible|plausible|likely|conceivable)"
            rf"|(?:is|would be) (?:also|equally|just as) {right}"
            rf"|{could} (?:be {right}|work|fit|hold)|also (?:works|fits|holds))\b(?! (?:if|only)\b)"
            rf"|\b(?i:possibly|perhaps|maybe|alternatively),? (?:option )?\(?({upper}){after}"
            rf"|\b{could} be (?:option )?\(?({upper}){after}",
        )

    def hedges(self, text: str, letter: str) -> bool:
        """Whether the conclusion doubts, offers this letter beside another, or ends with a second
        one that it calls possible."""
        conclusion = text[-CONCLUSION_CHARS:]
        doubts = [found[1] for found in _DOUBT.finditer(conclusion)]
        if any(doubt is None or doubt == letter for doubt in doubts):
            return True
        for found in self._several.finditer(conclusion):
            if letter in found.groups() and letter not in self._named(conclusion[found.end() :]):
                return True
        earlier = self._named(text[: len(text) - len(conclusion)])
        for found in self._possible.finditer(conclusion):
            other, end = found[1] or found[2] or found[3], found.end()
            before = earlier | self._named(conclusion[:end])
            if before - {other} and not self._named(conclusion[end:]) - {other}:
                return True
        return False

    def is_list(self, text: str) -> bool:
        """Whether a text begins by going through the options, so that its first letter is none."""
        found = [match[1] for match in self._listed.finditer(text)]
        return found[:1] == [self._first] and len(set(found)) > 1

    def bare(self, text: str) -> str | None:
        """The letter of a text that is a letter with marks around it."""
        found = self._bare.fullmatch(text)
        return found[1].upper() if found else None

    def stated(self, text: str) -> str | None:
        """The letter of the last statement: who corrects himself means the correction."""
        last, letter = -1, None
        for pattern in self._statements:
            for found in pattern.finditer(text):
                place = found.start(found.lastindex or 0)
                clause = text[max(0, found.start() - _CLAUSE_CHARS) : found.start()]
                is_said = not _SUPPOSED.search(clause) and not self._joined.search(clause)
                if place > last and is_said and not _is_denied(text, place):
                    last, letter = place, text[place].upper()
        return letter

    def leading(self, text: str) -> str | None:
        """The letter that a text begins with and goes on to explain."""
        found = self._leading.match(text)
        if not found or _is_denied(text, found.start(found.lastindex or 0)):
            return None
        return (found[1] or found[2]).upper()

    def only(self, text: str) -> str | None:
        """The letter of a text that names no other."""
        named = self._named(text)
        return named.pop() if len(named) == 1 else None

    def closing(self, line: str) -> str | None:
        """The letter that the last sentence of a line ends with, where it names no other."""
        sentence = re.split(r"[.!?;:] ", line)[-1]
        letter = self.only(sentence)
        is_last = letter == sentence.rstrip(".!)]\"'")[-1:].upper()
        return letter if is_last and " " in sentence else None

    def _named(self, text: str) -> set[str]:
        places = (found.start() for found in self._alone.finditer(text))
        return {
            text[it].upper() for it in places if not _is_word(text, it) and not _is_denied(text, it)
        }


def _is_denied(text: str, place: int) -> bool:
    """Tell whether the words around this place rule the letter out."""
    before = _DENIED.search(text, max(0, place - _CLAUSE_CHARS), place)
    return before is not None or _REFUTED.match(text, place + 1) is not None


def _is_word(text: str, place: int) -> bool:
    """Tell whether the letter at this place is the article "A" or the pronoun "I"."""
    if text[place] == "I":
        return True
    if text[place] != "A" or text[place + 1 : place + 2] != " ":
        return False
    begins = text[max(0, place - 2) : place].rstrip()[-1:] in ("", ".", "!", "?", ":", '"')
    next_word = text[place + 2 : place + 40].partition(" ")[0]
    return begins and next_word[:1].isalpha() and next_word.strip(".,;:!?") not in _AFTER_A
