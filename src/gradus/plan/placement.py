"""Which process computes on which GPUs: from what each wants and what the shell has. Pure.

The engine takes the first GPUs and the trainer those after, each a block of neighbours: neighbours
share a switch or NVLink more often than others, and both talk most among themselves. How many each
takes is what the config says already, `tensor_parallel_size` and `num_processes`: a number that
followed the machine would change what a run computes from one machine to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from gradus.config import InferenceConfig, SftConfig, TrainerConfig, dotted
from gradus.config.keys import KeyPath
from gradus.config.problems import Problem
from gradus.plan.gpus import ORDER, VISIBLE, FoundGpus


@dataclass(frozen=True)
class GpuWish:
    """What one process of a run wants."""

    key: KeyPath
    """Where its GPUs are written."""
    chosen: Sequence[int] | None
    """Numbers of GPUs in the shell; None leaves the choice to `place`."""
    count: int
    """One for each part of what computes."""
    count_key: str
    """The key that says how many parts there are."""
    can_do_without: bool
    """Whether it computes on the CPU when its list is empty."""

    @classmethod
    def of(cls, section: InferenceConfig | TrainerConfig | SftConfig) -> Self:
        if isinstance(section, InferenceConfig):
            key: KeyPath = ("inference", "gpus")
            count = section.replicas * section.num_gpus
            return cls(key, section.gpus, count, section.num_gpus_key, False)
        table: tuple[str, ...] = () if isinstance(section, SftConfig) else ("trainer",)
        count_key = ".".join((*table, "num_processes"))
        return cls((*table, "gpus"), section.gpus, section.num_processes, count_key, True)


@dataclass(frozen=True)
class Placement:
    """The GPUs of each process, or why they cannot have them."""

    gpus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Process → numbers of its GPUs in the shell; a process without an entry sees what the shell
    sees, as on a machine without a GPU."""
    refusals: tuple[Problem, ...] = ()

    def variables(self, process: str, found: FoundGpus, given: Mapping[str, str]) -> dict[str, str]:
        """What makes a process see its GPUs and no other; nothing where nothing is placed."""
        numbers = self.gpus.get(process)
        if numbers is None:
            return {}
        devices = {VISIBLE: ",".join(found.gpus[number].device for number in numbers)}
        # nvidia-smi counts along the bus, CUDA by default from the fastest; one order for both.
        return devices | {ORDER: given.get(ORDER, "PCI_BUS_ID")}

    def split(self, process: str, parts: Sequence[str]) -> Placement:
        """With the GPUs of a process given to its parts, to each a block of neighbours.

        >>> Placement({"inference": (0, 1, 2, 3)}).split("inference", ["a", "b"]).gpus
        {'a': (0, 1), 'b': (2, 3)}
        """
        if process not in self.gpus:
            return self
        numbers, rest = self.gpus[process], dict(self.gpus)
        del rest[process]
        size = len(numbers) // len(parts)
        blocks = {part: numbers[at * size : (at + 1) * size] for at, part in enumerate(parts)}
        return Placement({**blocks, **rest}, self.refusals)

    def shared(self) -> frozenset[int]:
        numbers = [number for own in self.gpus.values() for number in own]
        return frozenset(number for number in numbers if numbers.count(number) > 1)


def place(wishes: Mapping[str, GpuWish], found: FoundGpus, *, may_share: bool) -> Placement:
    """The GPUs of each process; `wishes` stand in the order in which those that choose nothing are
    served.

    >>> two = FoundGpus((Gpu("0", "A", None), Gpu("1", "A", None)))
    >>> wish = GpuWish(("trainer", "gpus"), None, 1, "trainer.num_processes", True)
    >>> place({"inference": wish, "trainer": wish}, two, may_share=False).gpus
    {'inference': (0,), 'trainer': (1,)}
    """
    if not found.gpus:
        return Placement(refusals=tuple(_without_gpus(wishes, found, may_share)))
    listed = {name: wish for name, wish in wishes.items() if wish.chosen is not None}
    faults = [(wish.key, _list_fault(wish, found)) for wish in listed.values()]
    refusals = [Problem(key, fault) for key, fault in faults if fault is not None]
    if refusals:
        return Placement(refusals=tuple(refusals))
    placed = {name: tuple(wish.chosen or ()) for name, wish in listed.items()}
    taken = {number for numbers in placed.values() for number in numbers}
    for name, wish in wishes.items():
        if name in placed:
            continue
        free = [n for n in range(len(found.gpus)) if may_share or n not in taken]
        if len(free) < wish.count:
            return Placement(refusals=(Problem(wish.key, _too_few(wishes, found)),))
        placed[name] = tuple(free[: wish.count])
        taken.update(placed[name])
    whole = Placement({name: placed[name] for name in wishes})
    return Placement(whole.gpus, tuple(_sharing_refusals(wishes, whole, may_share)))


def _without_gpus(
    wishes: Mapping[str, GpuWish], found: FoundGpus, may_share: bool
) -> Iterator[Problem]:
    for wish in wishes.values():
        if found.is_broken and wish.chosen != []:
            hidden = f'export {VISIBLE}="" to run without GPUs'
            yield Problem(
                wish.key,
                f"which GPUs this shell has is unknown: {found.why_none}; repair that, or {hidden}",
            )
        elif wish.chosen:
            yield Problem(
                wish.key,
                f"{list(wish.chosen)}: there is no GPU here: {found.why_none}; remove the key",
            )
    if may_share and len(wishes) > 1 and not found.is_broken:
        yield Problem(
            ("inference", "gpu_sharing"),
            f"there is no GPU here that could be shared: {found.why_none}; remove the key",
        )


def _list_fault(wish: GpuWish, found: FoundGpus) -> str | None:
    numbers = list(wish.chosen or ())
    here = len(found.gpus)
    known = "0" if here == 1 else f"0 to {here - 1}"
    if absent := [number for number in numbers if not 0 <= number < here]:
        return f"{numbers}: there is no GPU {absent[0]}; this shell has {here}: {known}"
    if len(set(numbers)) < len(numbers):
        return f"{numbers} names a GPU twice; name each once"
    if not numbers and wish.can_do_without:
        return None
    if not numbers:
        return "[]: vLLM's build for GPUs serves on no CPU; name a GPU, or remove the key"
    if len(numbers) == wish.count:
        return None
    return (
        f"{numbers} has {_counted(len(numbers))}, and {wish.count_key} = {wish.count} computes "
        f"on {_counted(wish.count)}; change one of them"
    )


def _too_few(wishes: Mapping[str, GpuWish], found: FoundGpus) -> str:
    here = len(found.gpus)
    needed = " and ".join(
        f"{name} wants {wish.count if wish.chosen is None else len(wish.chosen)} "
        f"({wish.count_key if wish.chosen is None else dotted(wish.key)})"
        for name, wish in wishes.items()
    )
    text = f"this shell has {_counted(here)} ({found.gpus[0].description}), and {needed}"
    if len(wishes) == 1:
        return f"{text}; lower that to {here}"
    return (
        f'{text}, each its own; write inference.gpu_sharing = "turns" (the engine sleeps while the '
        'trainer learns) or "memory" (both stay), or lower one of the numbers; see docs/gpu.md'
    )


def _sharing_refusals(
    wishes: Mapping[str, GpuWish], placement: Placement, may_share: bool
) -> Iterator[Problem]:
    shared = sorted(placement.shared())
    if shared and not may_share:
        (_, first), *_, (name, last) = wishes.items()
        yield Problem(
            last.key,
            f"{list(placement.gpus[name])}: GPU {', '.join(map(str, shared))} "
            f"belongs to {dotted(first.key)} too; choose others, or allow it with "
            "inference.gpu_sharing",
        )
    if may_share and len(wishes) > 1 and not shared:
        yield Problem(
            ("inference", "gpu_sharing"),
            "the engine and the trainer have no GPU in common, so there is nothing to share; "
            'write "never", or change their lists',
        )


def _counted(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"
