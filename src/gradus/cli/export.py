"""`gradus export`: what a run trained as a Hugging Face model directory, and on the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradus.cli.options import take_options, take_value, wants_help
from gradus.errors import ConfigError
from gradus.log import configure_logging

BEST, PUSH, PRIVATE = "--best", "--push", "--private"
USAGE = """usage: gradus export RUN_OR_CHECKPOINT DIRECTORY [--best] [--push owner/name [--private]]

Writes the newest checkpoint of a run (runs/NAME), or the one that is named
(runs/NAME/checkpoints/step_00000100), as a Hugging Face model directory; of a run without a
checkpoint the newest version that it published. Every byte is verified first; adapters are added
into the weights.

  --best             of a run with evaluations: the evaluated version with the highest average
                     reward instead of the newest; of equal ones the first
  --push owner/name  then upload the directory to that repository of the hub, which is made when
                     there is none; needs a token that may write (HF_TOKEN, or `hf auth login`)
  --private          make the repository private, and refuse one that is public"""


def run(words: Sequence[str]) -> int:
    if wants_help(words):
        print(USAGE)
        return 0
    name, rest = take_value(words, PUSH, wants="owner/name")
    taken, rest = take_options(rest, {BEST: "", PRIVATE: ""})
    if len(rest) != 2 or any(word.startswith("-") for word in rest):
        raise ConfigError(f"expected a run or a checkpoint, and a directory\n{USAGE}")
    if PRIVATE in taken and name is None:
        raise ConfigError("--private says how --push uploads; give --push owner/name too")
    source, directory = Path(rest[0]), Path(rest[1])
    if not source.is_dir():
        raise ConfigError(f"{source}: no such directory (seen from {Path.cwd()})")
    configure_logging("export")

    from gradus.trainer.export import export, export_best, open_repository, push

    # A name or a token that no hub accepts is refused before an export that may take minutes.
    repository = None if name is None else open_repository(name, private=PRIVATE in taken)
    if BEST in taken:
        best = export_best(source, directory)
        step = best.version
        print(f"best: {best}", flush=True)
    else:
        step = export(source, directory)
    print(f"{directory} holds the weights after {step} steps", flush=True)
    if repository is not None:
        address = push(directory, repository, message=f"Weights after {step} steps of gradus")
        print(f"{address} holds them too")
    return 0
