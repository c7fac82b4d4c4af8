"""The words to guess: our own lists of three and of five letters, or those of `english-words`."""

from __future__ import annotations

import importlib
from typing import Any

from gradus.errors import ConfigError

_THREE = (
    "cat dog sun map pen hut jar fox bee key log wig ant cup ice nut oak pie rug toe van yak zip "
    "arm bud cod dew eel fan gum hay ink jam kit leg mud net owl pig rib sky tub urn vow web axe "
    "box cow den egg fog gap hen ivy joy lid mop"
)
_FIVE = (
    "about above actor adopt adult agent agree alarm album alert alike alive allow alone angel "
    "anger angle ankle apple apron arena argue arise armor arrow aside asset audio avoid awake "
    "award bacon badge baker basic basin beach beard beast begin being belly below bench berry "
    "birth black blade blame blank blast blaze bleak blend bless blind block blood bloom board "
    "boast bonus boost booth brain brake brand brave bread break brick bride brief bring broad "
    "broom brown brush build bunch cabin cable camel candy canoe cargo carry catch cause cedar "
    "chain chair chalk charm chart chase cheap check cheek cheer chess chest chief child chill "
    "choir chord civic claim clash class clean clear clerk cliff climb clock cloth cloud clown "
    "coach coast cocoa coral couch count court cover crack craft crane crash cream creek crest "
    "crime crisp cross crowd crown crust curve cycle daily dairy dance depth diary digit dizzy "
    "donor doubt dough draft drain drama dream dress drift drill drink drive eager eagle early "
    "earth elbow elder empty enemy enjoy enter equal error event every exact exist extra fable "
    "faith fancy fault feast fence ferry fever field fifth final flame flash fleet floor flour "
    "fluid flute focus force forge forty frame fresh front frost fruit ghost giant glass globe "
    "glory glove grace grade grain grand grape grass gravy great green grill group guard guess "
    "guest guide habit happy harsh heart heavy hedge hinge hobby honey honor horse hotel house "
    "human humor ideal image index inner input ivory jelly jewel joint judge juice knife knock "
    "label labor large laugh layer learn lemon level light limit linen liver local logic loose "
    "lucky lunar lunch magic major maple march match medal melon mercy merit metal minor model "
    "money month moral motor mount mouse mouth movie music nerve never night noble noise north "
    "novel nurse ocean offer olive onion orbit order organ other otter outer owner paint panel "
    "paper party pasta patch peace peach pearl penny phase piano piece pilot pitch place plain "
    "plane plant plate plaza point porch pound power press price pride print prize proof pulse "
    "punch pupil queen quick quiet quilt radio raise ranch range rapid razor reach ready rebel "
    "relax reply rider ridge right rival river roast robot rough round route royal ruler salad "
    "sauce scale scarf scene scent score scout seven shade shake shape share shark sharp sheep "
    "sheet shelf shell shine shirt shock shore short shout skate skill skirt slate sleep slice "
    "slope smart smile smoke snack snake solar solid sound south space spare spark speak speed "
    "spice spoon sport staff stage stair stamp stand start steam steel stick stone store storm "
    "story stove straw sugar sunny swamp sweet sword table taste teach thick thing third three "
    "tiger title toast topic torch total touch tower toxic track trade trail train trait treat "
    "trend trial tribe trick truck trunk trust truth tulip tutor twist uncle under union unity "
    "upper urban usual value vapor vault verse video visit vital voice wagon waste watch water "
    "whale wheat wheel white whole woman world worry wrist young youth zebra"
)
OWN_WORDS = {3: tuple(_THREE.split()), 5: tuple(_FIVE.split())}
"""Common words by their length."""


def own_words(length: int) -> tuple[str, ...]:
    """Our words of a length; ConfigError for a length that we have no list of."""
    if length not in OWN_WORDS:
        raise ConfigError(
            f"length = {length}: our own lists have words of {' and '.join(map(str, OWN_WORDS))} "
            'letters; words = "english-words" has others'
        )
    return OWN_WORDS[length]


def english_words(length: int) -> tuple[str, ...]:
    """Words of a length from the package `english-words`, many of them rare, sorted."""
    try:
        package: Any = importlib.import_module("english_words")
    except ModuleNotFoundError as error:
        raise ConfigError(
            'words = "english-words" needs the package of this name; install gradus with its '
            "extra: pip install 'gradus-rl[reasoning]'"
        ) from error
    found = package.get_english_words_set(["web2"], alpha=True, lower=True)
    chosen = sorted(word for word in found if len(word) == length and word.isascii())
    if not chosen:
        raise ConfigError(f"length = {length}: english-words has no word of that length")
    return tuple(chosen)
