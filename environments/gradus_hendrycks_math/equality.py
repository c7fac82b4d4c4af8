"""Whether two answers are the same number or expression, by math-verify; for a helper process."""

from __future__ import annotations

from math_verify import parse, verify


def are_equal(expected: str, given: str) -> bool:
    """True when both are read and are equal. It may hang; the caller has a deadline."""
    # math-verify's own deadline is an alarm, which the helper needs for itself.
    gold, found = (
        parse(f"$\\boxed{{{answer}}}$", parsing_timeout=0, raise_on_error=False)
        for answer in (expected, given)
    )
    return bool(gold and found and verify(gold, found, timeout_seconds=0))
