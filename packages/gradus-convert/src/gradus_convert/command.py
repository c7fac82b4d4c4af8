"""`gradus convert`: a file of prime-rl as one of gradus."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gradus.config import read_config_file
from gradus.errors import ConfigError, ExitCode
from gradus_convert.prime_rl import from_prime_rl

USAGE = """\
usage: gradus convert FILE

Prints the config of gradus for a file of prime-rl's rl, sft or eval, with a comment for each key
that has no equivalent, and for what a start would still refuse."""


def run(words: Sequence[str]) -> int:
    if {"--help", "-h"} & {*words}:
        text = USAGE
    else:
        files = [word for word in words if word != "@"]
        if len(files) != 1 or files[0].startswith("-"):
            raise ConfigError(f"name one file of prime-rl; its flags go into the file\n{USAGE}")
        text = from_prime_rl(read_config_file(files[0])[0]).toml().rstrip("\n")
    sys.stdout.write(f"{text}\n")
    return ExitCode.DONE
