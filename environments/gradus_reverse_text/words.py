"""Texts of random words, the same for the same seed, on every machine.

Every text belongs to exactly one split, decided by its own hash. So a text of the holdout split
is never seen in training, whatever the seeds.
"""

from __future__ import annotations

import hashlib
import random
from typing import Literal

Split = Literal["train", "holdout"]

HOLDOUT_PERCENT = 10
_MOST_DRAWS_PER_TEXT = 200
_WORDS = (
    "able acid army away axis baby bank bear bell bird blue boat bone book bowl busy cake "
    "calm card cash cave city club coal coat code cold cook copper crew crop dark dawn desk "
    "dish door dream duck dust eagle earth east echo edge evil exit face farm fast film fire "
    "fish flag fly fog forest four fox frog game gate ghost gift glass goat gold good grape "
    "grey hand harp hat hill honey horse house ice idea iron island jam jazz jewel job joke "
    "judge juice jump keep key kind king kite knee knot lake lamp leaf lemon lion lock lunch "
    "map milk mint moon moth mouse music nail near nest night north nut oak ocean oil old "
    "olive onion orbit oven owl page paint path peace pen piano pink plum pond queen quick "
    "quiet quilt rain red ring river road rock roof rose salt sand ship silk sky snow song "
    "star stone sun table tea tent tiger time toy tree tulip turn umbrella under unit uncle "
    "valley van vase velvet verb vine violin voice walk wall warm water wave west wheel wind "
    "winter wolf wood word yard year yellow young zebra zero zigzag zone zoo"
)
WORDS = tuple(_WORDS.split())


def split_of(text: str) -> Split:
    """The split that `text` belongs to; about one text in ten is held out."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    return "holdout" if number % 100 < HOLDOUT_PERCENT else "train"


def generate_texts(
    num: int, *, seed: int, min_words: int = 2, max_words: int = 4, split: Split = "train"
) -> list[str]:
    """`num` different texts of lowercase letters and single spaces, all of one split.

    Refuses with ValueError when there are not that many different texts.

        >>> generate_texts(2, seed=0)
        ['under wheel old knot', 'tea yard fast']
    """
    if not 1 <= min_words <= max_words:
        raise ValueError(
            f"min_words = {min_words} and max_words = {max_words}: use 1 <= min_words <= max_words"
        )
    draw = random.Random(f"reverse-text {seed} {split}")
    texts: dict[str, None] = {}
    for _ in range(num * _MOST_DRAWS_PER_TEXT):
        if len(texts) == num:
            break
        text = " ".join(draw.choices(WORDS, k=draw.randint(min_words, max_words)))
        if split_of(text) == split:
            texts[text] = None
    if len(texts) < num:
        raise ValueError(
            f"only {len(texts)} of {num} different texts of {min_words} to {max_words} words were "
            f"found in the split {split!r}; ask for fewer or for longer ones"
        )
    return list(texts)
