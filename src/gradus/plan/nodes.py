"""Which process of a run computes on which node, and on which of its GPUs. Pure.

The trainer comes first, in even parts on whole nodes as far as they go, since its ranks talk most;
then each replica takes GPUs of one node. What one list says is not changed by another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gradus.config import (
    EvalConfig,
    LaunchedConfig,
    NodesConfig,
    RunConfig,
    SftConfig,
)
from gradus.config.problems import Problem
from gradus.errors import ConfigError
from gradus.plan.gpus import FoundGpus, Gpu
from gradus.plan.placement import GpuWish, Placement

_TABLE = ("launch", "nodes")


@dataclass
class NodePlan:
    """Where the processes of a run are."""

    number: int = 1
    gpus_per_node: int = 0
    trainer: tuple[int, ...] = ()
    """The nodes of its ranks, the first ones on the first."""
    ranks_per_node: int = 1
    node_of: dict[str, int] = field(default_factory=dict)
    """Replica → its node."""
    gpus: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    """Process and node → numbers of GPUs there."""
    launchers: str = "launcher, orchestrator, environments"
    """What is on node 0, whatever else is."""
    refusals: list[Problem] = field(default_factory=list)

    @property
    def found(self) -> FoundGpus:
        """The GPUs of any one node."""
        kind = "of each node"
        return FoundGpus(tuple(Gpu(str(n), kind, None) for n in range(self.gpus_per_node)))

    def placement(self) -> Placement:
        """The GPUs of each process on its (first) node."""
        first = self.node_of | ({"trainer": self.trainer[0]} if self.trainer else {})
        placed = {name: self.gpus.get((name, node)) for name, node in first.items()}
        return Placement(
            {name: gpus for name, gpus in placed.items() if gpus is not None}, tuple(self.refusals)
        )

    def describe(self) -> list[str]:
        """A line for each node."""
        return [
            f"  node {number:<4} {', '.join(self._on(number))}" for number in range(self.number)
        ]

    def _on(self, node: int) -> Iterator[str]:
        if node == 0:
            yield self.launchers
        else:
            yield "gradus node"
        if node in self.trainer:
            first = self.trainer.index(node) * self.ranks_per_node
            last = first + self.ranks_per_node - 1
            ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
            yield f"trainer {ranks}{self._gpu_words('trainer', node)}"
        for name, at in self.node_of.items():
            if at == node:
                yield f"{name}{self._gpu_words(name, node)}"

    def _gpu_words(self, process: str, node: int) -> str:
        numbers = self.gpus.get((process, node))
        if not numbers:
            return ""
        own = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
        return f" (GPU {own})"


def plan_nodes(config: LaunchedConfig) -> NodePlan | None:
    """Who runs where; None where everything runs on the launcher's node."""
    nodes = config.launch.nodes
    if nodes is None:
        return None
    plan = NodePlan(gpus_per_node=nodes.gpus)
    free = _Free(nodes.gpus)
    plan.refusals += _unsupported(config)
    if isinstance(config, SftConfig):
        plan.launchers = "launcher, evaluator, environments" if config.eval else "launcher"
        _place_trainer(plan, nodes, GpuWish.of(config), free)
    elif isinstance(config, EvalConfig):
        plan.launchers = "launcher, evaluator, environments"
    else:
        _place_trainer(plan, nodes, GpuWish.of(config.trainer), free)
    if serves(config):
        _place_replicas(plan, nodes, config, free)
    needed = 1 + max([0, *plan.trainer, *plan.node_of.values()])
    plan.number = nodes.number or needed
    if plan.number < needed:
        text = f"{plan.number}: the processes of this run take {needed} nodes; see {_who(plan)}"
        plan.refusals.append(Problem((*_TABLE, "number"), text))
    return plan


def required_nodes(config: LaunchedConfig, option: str, whose: str) -> NodePlan:
    """ConfigError where nothing says what a node is, from which an option takes them."""
    plan = plan_nodes(config)
    if plan is None:
        raise ConfigError(
            f"launch.nodes is missing, from which {option} takes the nodes of the {whose}; write "
            "[launch.nodes] with gpus = the GPUs of each node, 0 where all compute on CPUs"
        )
    return plan


class _Free:
    """How many GPUs of each node are taken, from the first on."""

    def __init__(self, gpus: int) -> None:
        self._gpus = gpus
        self._taken: dict[int, int] = {}

    def left(self, node: int) -> int:
        return self._gpus - self._taken.get(node, 0)

    def take(self, node: int, count: int) -> tuple[int, ...]:
        first = self._taken.get(node, 0)
        self._taken[node] = first + count
        return tuple(range(first, first + count))


def _place_trainer(plan: NodePlan, nodes: NodesConfig, wish: GpuWish, free: _Free) -> None:
    path, ranks = (*_TABLE, "trainer"), wish.count
    chosen = nodes.trainer
    if chosen is None:
        parts = range(1, ranks + 1)
        even = (n for n in parts if ranks % n == 0 and (not nodes.gpus or ranks // n <= nodes.gpus))
        chosen = list(range(next(even)))
    plan.trainer, plan.ranks_per_node = tuple(chosen), ranks // len(chosen)
    if fault := _list_fault(chosen, nodes):
        plan.refusals.append(Problem(path, fault))
    elif ranks % len(chosen):
        text = f"{chosen}: {ranks} processes ({wish.count_key}) do not spread evenly over "
        plan.refusals.append(Problem(path, f"{text}{len(chosen)} nodes; change one of them"))
    elif nodes.gpus and plan.ranks_per_node > nodes.gpus:
        text = f"{chosen}: {plan.ranks_per_node} processes on each, which has {nodes.gpus} GPUs "
        plan.refusals.append(Problem(path, f"{text}(launch.nodes.gpus); name more nodes"))
    elif nodes.gpus:
        for node in chosen:
            plan.gpus["trainer", node] = free.take(node, plan.ranks_per_node)


def _place_replicas(
    plan: NodePlan, nodes: NodesConfig, config: LaunchedConfig, free: _Free
) -> None:
    path, inference = (*_TABLE, "inference"), config.inference
    names, wanted = inference.processes, inference.num_gpus if nodes.gpus else 0
    key = inference.num_gpus_key.removeprefix("inference.replicas x ")
    if wanted > nodes.gpus:
        text = f"a replica takes {wanted} GPUs ({key}) of one node, which has {nodes.gpus} "
        plan.refusals.append(Problem((*_TABLE, "gpus"), f"{text}(launch.nodes.gpus); lower it"))
        return
    chosen = nodes.inference
    if chosen is not None and (fault := _list_fault(chosen, nodes)):
        plan.refusals.append(Problem(path, fault))
        return
    if chosen is not None and len(names) % len(chosen):
        text = f"{chosen}: {len(names)} replicas (inference.replicas) do not spread evenly over "
        plan.refusals.append(Problem(path, f"{text}{len(chosen)} nodes; change one of them"))
        return
    for number, name in enumerate(names):
        if chosen is None:
            node = next(n for n in range(len(names) + 1024) if free.left(n) >= wanted)
        else:
            node = chosen[number * len(chosen) // len(names)]
        if free.left(node) < wanted:
            text = f"{chosen}: {name} takes {wanted} GPUs ({key}), and {free.left(node)} of "
            text += f"{nodes.gpus} are free on node {node}; {_who(plan)}"
            plan.refusals.append(Problem(path, text))
            return
        plan.node_of[name] = node
        if nodes.gpus:
            plan.gpus[name, node] = free.take(node, wanted)


def _list_fault(chosen: list[int], nodes: NodesConfig) -> str | None:
    if len(set(chosen)) < len(chosen):
        return f"{chosen} names a node twice; name each once"
    most = 1024 if nodes.number is None else nodes.number
    if absent := [node for node in chosen if not 0 <= node < most]:
        return f"{chosen}: there is no node {absent[0]}; the nodes are 0 to {most - 1}"
    return None


def _who(plan: NodePlan) -> str:
    found = [f"{name} is on node {node}" for name, node in plan.node_of.items()]
    if plan.trainer:
        places = f"each of nodes {list(plan.trainer)}"
        found.insert(0, f"trainer has {plan.ranks_per_node} processes on {places}")
    return ", ".join(found)


def serves(config: LaunchedConfig) -> bool:
    """Whether the run has servers, which need not be its own."""
    if isinstance(config, EvalConfig):
        return config.base_url is None
    return isinstance(config, RunConfig) or config.eval is not None


def _unsupported(config: LaunchedConfig) -> Iterator[Problem]:
    """What needs a common machine, or is not there to be placed."""
    assert config.launch.nodes is not None
    if isinstance(config, EvalConfig) and config.launch.nodes.trainer is not None:
        text = "an evaluation trains nothing; remove the key"
        yield Problem((*_TABLE, "trainer"), text)
    if not serves(config) and config.launch.nodes.inference is not None:
        text = "nothing is served, and the list says where; remove the key"
        yield Problem((*_TABLE, "inference"), text)
    if isinstance(config, RunConfig) and config.trainer.weight_transfer == "broadcast":
        yield Problem(
            ("trainer", "weight_transfer"),
            "a broadcast does not leave its machine yet; use filesystem with launch.nodes",
        )
    if config.inference.addresses is not None:
        yield Problem(
            ("inference", "addresses"),
            "names servers that others start, and launch.nodes places our own; remove one of them",
        )
    if config.inference.gpu_sharing != "never":
        yield Problem(
            ("inference", "gpu_sharing"),
            "engine and trainer share no GPU where launch.nodes places them; remove the key",
        )
    trainer = getattr(config, "trainer", None)
    for table, section in {
        ("inference",): config.inference,
        (): config,
        ("trainer",): trainer,
    }.items():
        if getattr(section, "gpus", None) is not None:
            text = "counts the GPUs of one machine; launch.nodes places by node"
            yield Problem((*table, "gpus"), text)
