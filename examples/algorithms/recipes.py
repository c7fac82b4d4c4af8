"""One run per algorithm: where it starts, what it plays, and what shows that it learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from measures import (
    AGAINST_START,
    EVALUATED,
    EXPLOITABILITY,
    IMITATION,
    MISTAKES,
    REWARD,
    SURPRISE,
    SURPRISE_IN_BATCH,
    TEACHER_DISTANCE,
    Measure,
)

FOLDER = Path("examples/algorithms")
RUNS = Path("runs/algorithms")
"""Both relative to the repository, like the paths in the TOML files."""

POKER = (MISTAKES, AGAINST_START, EXPLOITABILITY)
TEACHER = "teacher_text"
"""The warm-up whose model is the frozen teacher; it continues from that of `reverse_text`."""
GOES_ON_FROM = {TEACHER: ("reverse_text",)}
"""Warm-up → those that must come before it."""


@dataclass(frozen=True)
class Recipe:
    """One run."""

    name: str
    config: str
    """Names `rl_<config>.toml`."""
    start: str
    """Names `sft_<start>.toml`, the warm-up."""
    shown: tuple[Measure, ...]
    flags: tuple[str, ...] = ()
    has_teacher: bool = False
    """Whether the frozen teacher must be served meanwhile."""

    def run_name(self, seed: int) -> str:
        """Name of the run's directory."""
        return self.name if seed == 0 else f"{self.name}-seed{seed}"

    def run_dir(self, repository: Path, seed: int) -> Path:
        """Where the run's results are."""
        return repository / RUNS / self.run_name(seed)

    def arguments(self, seed: int) -> list[str]:
        """The words behind `gradus`."""
        config = str(FOLDER / f"rl_{self.config}.toml")
        name = ["--name", self.run_name(seed), "--seed", str(seed), "--clean"]
        return ["rl", "@", config, *self.flags, *name]

    @property
    def warm_ups(self) -> tuple[str, ...]:
        """The models that must be there, in the order in which they are made."""
        needed = (self.start, TEACHER) if self.has_teacher else (self.start,)
        return tuple(
            name
            for start in needed
            for name in dict.fromkeys((*GOES_ON_FROM.get(start, ()), start))
        )


def algo(kind: str, **options: str) -> tuple[str, ...]:
    """The flags that choose an algorithm and its options."""
    flags = ["--orchestrator.train.algo.type", kind]
    for name, value in options.items():
        flags += [f"--orchestrator.train.algo.{name}", value]
    return tuple(flags)


def warm_up_arguments(name: str) -> list[str]:
    """The words behind `gradus` that make the model of a warm-up."""
    return ["sft", "@", str(FOLDER / f"sft_{name}.toml"), "--clean"]


def model_of(warm_up: str) -> Path:
    """Relative to the repository."""
    return RUNS / f"warm-up-{warm_up}" / "model"


RECIPES: Sequence[Recipe] = (
    Recipe("grpo", "reverse_text", "reverse_text", (REWARD,), algo("grpo")),
    Recipe("max_rl", "reverse_text", "reverse_text", (REWARD,), algo("max_rl")),
    Recipe("hierarchical_grpo", "kuhn_poker", "kuhn_poker", POKER, algo("hierarchical_grpo")),
    Recipe("rae", "kuhn_poker", "kuhn_poker", POKER, algo("rae")),
    Recipe(
        "rae_subtract_first",
        "kuhn_poker",
        "kuhn_poker",
        POKER,
        algo("rae", order="subtract_first"),
    ),
    Recipe("echo", "word_lookup", "word_lookup", (SURPRISE, REWARD), algo("echo")),
    Recipe(
        "echo_batch",
        "word_lookup",
        "word_lookup",
        (SURPRISE_IN_BATCH, REWARD),
        # One token in sixteen is an observation, so the usual 0.1 would hardly be seen in 20 steps.
        algo("echo", normalize="batch", roles='{"tool": 1.0}'),
    ),
    Recipe("grpo_forth", "forth_lang", "forth_lang", (REWARD,), algo("grpo")),
    Recipe(
        "echo_forth",
        "forth_lang",
        "forth_lang",
        (SURPRISE, REWARD),
        algo("echo", roles='{"tool": 0.05}', tool_names='["submit_code"]'),
    ),
    Recipe("opd", "taught_text", "reverse_text", (TEACHER_DISTANCE, REWARD), has_teacher=True),
    Recipe("opsd", "hinted_text", "hinted_text", (TEACHER_DISTANCE, REWARD)),
    Recipe("sft", "shown_text", "reverse_text", (IMITATION, EVALUATED), has_teacher=True),
)
