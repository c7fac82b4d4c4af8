"""The limits and the dependency rule of the architecture, measured on the tree."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Set
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from house import Module, Tree

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "gradus"
TREE = cache(Tree)
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 7
MAX_FILES_IN_A_FOLDER = 12
MAX_NAMES_FROM_CONFIG = 60
MIN_LINES_FOR_ONE_IMPORTER = 80
MAX_MOCKS_PER_HUNDRED_TESTS = 5
WAITS = ROOT / "tests" / "support" / "commands.py"
"""The one module that may sleep, for tests that wait for a condition."""

TOP_LEVEL = {
    *("companions", "errors", "files", "gate", "heartbeat", "installed"),
    *("log", "plugins", "redact", "sealed", "tokenizing"),
}
FOUNDATIONS = {"run", "processes", "rows"}
"""Packages that every other may import; `processes` and `rows` import no package."""
DOORS = {"__init__": {"launch"}, "__main__": {"cli"}}
"""What `import gradus` offers on first use, and what `python -m gradus` runs."""
ROLES = {"orchestrator", "trainer", "inference"}
MAY_IMPORT: dict[str, set[str]] = {
    "run": set(),
    "processes": set(),
    "rows": set(),
    "wire": set(),
    "config": set(),
    # What this machine has for a config, and what starts on it.
    "plan": {"config"},
    "transport": {"wire", "config"},
    "weights": {"wire", "config"},
    "monitor": {"wire", "config"},
    # Reads the folder of a run, finished or not, and writes nothing into it.
    "report": {"config", "monitor", "tracking"},
    # The same in a browser, with what the report reads, and an index of episodes.
    "view": {"wire", "monitor", "report"},
    # The process that gives what a run wrote to trackers.
    "tracking": {"config", "monitor"},
    "environments": {"wire", "config"},
    "orchestrator": {"wire", "config", "transport", "monitor"},
    "trainer": {"wire", "config", "plan", "transport", "weights", "monitor"},
    "inference": {"wire", "config", "plan", "weights"},
    # The launcher prints the steps that the orchestrator records, with the monitor's own words.
    # From Python a run is read by the index of the page.
    "launch": {"config", "plan", "monitor", "view"},
    # The scripted engine verifies published weights by the same manifest as the real one.
    "testing": {"wire", "weights"},
    # `gradus init` measures rows as the policy reads them, and writes the tiny model.
    "project": {"config", "plan", "orchestrator", "testing"},
    # `gradus env check` plays an environment as a run does, with the scripted engine.
    "conformance": {"wire", "config", "environments", "orchestrator", "testing"},
    "cli": {
        *("wire", "config", "plan", "transport", "weights", "monitor", "environments"),
        *("launch", "report", "testing", "conformance", "tracking", "project", *ROLES),
        "view",
    },
}
BESIDE: dict[str, Set[str]] = {
    "gradus_kit": {"processes", "rows", "wire"},
    "gradus_chat": {"environments", "wire"},
    "gradus_cluster": FOUNDATIONS | {"wire", "config", "plan", "cli"},
    "gradus_convert": FOUNDATIONS | {"config"},
    "gradus_lab": MAY_IMPORT.keys() - {"inference", "environments", "testing"},
}
"""What of gradus the task sets' own library and the packages may import; gradus imports none."""
WITHOUT_HEAVY = {"gradus_cluster", "gradus_convert", "gradus_kit"}
ORCHESTRATOR_FLOORS = (
    *({"traces"}, {"types"}, {"failures"}, {"algorithms"}, {"groups"}, {"play"}, {"records"}),
    *(
        {"resume"},
        {"evaluation"},
        {"buffer"},
        {"trainer_link"},
        {"early_end"},
        {"orchestrator"},
    ),
    *({"live"}, {"build"}),
)
"""Rooms of the orchestrator from the ground up; each imports only itself and those below."""
HEAVY = {"torch", "transformers", "verifiers", "vllm", "renderers", "peft", "zmq", "wandb"}
MAY_IMPORT_HEAVY: dict[str, set[str]] = {
    "transport": {"zmq"},
    "weights": {"torch"},
    "environments": {"verifiers", "renderers", "zmq"},
    "orchestrator": {"verifiers", "renderers", "zmq"},
    "trainer": {"torch", "transformers", "peft"},
    "inference": {"vllm", "torch", "transformers"},
    "conformance": {"verifiers", "renderers"},
    "testing": {"verifiers", "torch", "transformers"},
}
BANNED_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
PICKLES_CODE = "src/gradus/launch/from_python/own_tasks.py"
"""Writes a user's own function, which is code anyway, into the folder of that user's run."""
BANNED_CALLS = {"eval", "exec"}
BANNED_ATTRIBUTES = {("torch", "load"), ("yaml", "load"), ("os", "system")}
BANNED_METHODS = {"recv_pyobj", "send_pyobj"}
BANNED_SWITCHES = {"shell", "allow_pickle"}
KILLS_BY_NAME = re.compile(r"\b(pkill|killall)\b")


# The exceptions below only shrink.
FULL_FOLDERS = {}
"""Folders with more than twelve files, and the most that each may hold."""
SHORT_WITH_ONE_IMPORTER = {
    "gradus.inference.engine.worker": "vLLM imports it by name, and on CPUs only",
    "gradus.trainer.model.cpu.scan": "one recurrence, with shapes that need their own legend",
    "gradus.trainer.entry.precision": "runs in a process of its own",
    "gradus.tracking.webhook": "a config names it, as it does every tracker",
}
"""Short modules with one importer that are better alone, with the reason."""


KIT = "environments/gradus_kit"
CHAT = "environments/gradus_chat"
IN_ENVIRONMENTS = {"gradus_kit", "gradus_chat"}
PACKAGES = [
    f"packages/{it.replace('_', '-')}/src/{it}" for it in BESIDE if it not in IN_ENVIRONMENTS
]


def sources() -> list[Module]:
    return list(TREE(ROOT))


def workspace() -> Tree:
    """gradus and the packages that stand on it."""
    return TREE(ROOT, "src/gradus", *PACKAGES)


def everything() -> list[Module]:
    """gradus, its packages and the library of its task sets, which share limits and style."""
    return [*workspace(), *TREE(ROOT, KIT, CHAT)]


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def gradus_packages(module: Module) -> dict[str, int]:
    """Packages of gradus that a module imports, with a line each."""
    found: dict[str, int] = {}
    for i in module.imports:
        parts = i.dotted.split(".")
        if parts[0] == "gradus" and len(parts) > 1 and parts[1] in MAY_IMPORT:
            found.setdefault(parts[1], i.line)
    return found


def test_files_are_short() -> None:
    long = [f"{short(m.path)}: {m.lines}" for m in everything() if m.lines > MAX_FILE_LINES]
    assert long == []


def test_functions_are_short() -> None:
    long = [
        f"{short(module.path)}:{f.lineno} {f.name}: {lines}"
        for module in everything()
        for f in module.functions
        if (lines := (f.end_lineno or f.lineno) - f.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_functions_take_few_parameters() -> None:
    many = []
    for module in everything():
        for function in module.functions:
            arguments = function.args
            names = [a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]
            count = len([name for name in names if name not in {"self", "cls"}])
            if count > MAX_PARAMETERS:
                many.append(f"{short(module.path)}:{function.lineno} {function.name}: {count}")
    assert many == []


def test_every_argument_and_return_has_a_type() -> None:
    untyped = []
    for module in everything():
        for function in module.functions:
            a = function.args
            arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
            missing = [
                x.arg
                for x in arguments
                if x is not None and x.annotation is None and x.arg not in {"self", "cls"}
            ]
            if missing or function.returns is None:
                untyped.append(f"{short(module.path)}:{function.lineno} {function.name} {missing}")
    assert untyped == []


def test_folders_hold_few_files() -> None:
    """More files in a folder means that it holds several concerns."""
    counts = workspace().files_per_folder | TREE(ROOT, KIT, CHAT).files_per_folder
    full = {
        folder: count
        for folder, count in counts.items()
        if count > FULL_FOLDERS.get(folder, MAX_FILES_IN_A_FOLDER)
    }
    assert full == {}, "split the folder by concern, or merge modules that go together"
    needless = [f for f in FULL_FOLDERS if counts.get(f, 0) <= MAX_FILES_IN_A_FOLDER]
    assert needless == [], "these folders are small enough: take them out of FULL_FOLDERS"


def test_a_short_module_has_more_than_one_importer() -> None:
    """A short module with one importer belongs in that importer."""
    tree = workspace()
    slices = {
        name
        for name in tree.imported_by_one
        if tree.modules[name].lines <= MIN_LINES_FOR_ONE_IMPORTER
    }
    assert sorted(slices - SHORT_WITH_ONE_IMPORTER.keys()) == [], "merge each into its importer"
    assert sorted(SHORT_WITH_ONE_IMPORTER.keys() - slices) == [], "these need no reason any more"


def test_every_module_is_named_by_another_file() -> None:
    rooms = [ROOT / room for room in ("src", "packages", "environments", "examples")]
    texts = {path: path.read_text() for room in rooms for path in room.rglob("*.py")}
    texts |= {path: path.read_text() for path in ROOT.glob("packages/*/pyproject.toml")}
    imported = {it.dotted for module in workspace() for it in module.imports}
    unnamed = [
        module.name
        for module in workspace()
        if not module.is_package and module.name not in {"gradus.__main__", *imported}
        if not any(module.name in text for path, text in texts.items() if path != module.path)
    ]
    assert unnamed == []


def test_a_public_class_name_is_defined_once() -> None:
    assert workspace().classes_defined_twice == {}


def test_other_packages_know_few_names_of_config_and_take_them_from_its_door() -> None:
    names = TREE(ROOT).names_from_config
    assert len(names) <= MAX_NAMES_FROM_CONFIG, sorted(names)
    assert [name for name, homes in names.items() if homes != {"gradus.config"}] == []


def test_packages_and_top_level_helpers_are_the_listed_ones() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    helpers = {path.stem for path in SOURCE.glob("*.py")} - DOORS.keys()
    assert (packages, helpers) == (set(MAY_IMPORT), TOP_LEVEL)
    found = {path.name for path in ROOT.glob("packages/*/src/*")}
    assert found | {"gradus_chat", "gradus_kit"} == BESIDE.keys()


def test_packages_import_only_what_the_rule_allows() -> None:
    wrong = []
    for module in sources():
        owner = module.package
        base = set() if owner in ("processes", "rows") else FOUNDATIONS
        base = base | DOORS.get(module.path.stem, set())
        allowed = base | MAY_IMPORT[owner] | {owner} if owner else base
        wrong += [
            f"{short(module.path)}:{line} imports gradus.{package}"
            for package, line in gradus_packages(module).items()
            if package not in allowed
        ]
    assert wrong == []


def test_what_stands_beside_gradus_is_never_under_it() -> None:
    wrong = []
    for module in everything():
        own = module.name.split(".")[0]
        banned = BESIDE.keys() - {own} | (
            set() if own in ("gradus", "gradus_lab", "gradus_chat") else HEAVY
        )
        wrong += [
            f"{short(module.path)}:{i.line} imports {i.module}"
            for i in module.imports
            if i.module.split(".")[0] in banned
        ]
        wrong += [
            f"{short(module.path)}:{line} imports gradus.{package}"
            for package, line in gradus_packages(module).items()
            if package not in BESIDE.get(own, MAY_IMPORT)
        ]
    assert wrong == []


def test_heavy_libraries_are_imported_only_where_the_rule_allows() -> None:
    wrong = []
    for module in sources():
        owner = module.package
        allowed = HEAVY if owner == "cli" else MAY_IMPORT_HEAVY.get(owner or "", set())
        for i in module.imports:
            root = i.module.split(".")[0]
            if root in HEAVY and root not in allowed and module.path.stem != root:
                wrong.append(f"{short(module.path)}:{i.line} imports {root}")
    assert sorted(set(wrong)) == []


def test_no_packages_import_one_another_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module in sources():
        if module.package:
            found = graph.setdefault(module.package, set())
            found |= gradus_packages(module).keys() - {module.package}
    tuple(TopologicalSorter(graph).static_order())


def test_no_two_modules_import_each_other() -> None:
    graph = {
        module.name: {name for i in module.imports for name in (i.module, i.dotted)}
        for module in everything()
    }
    mutual = [(a, b) for a in graph for b in graph[a] & graph.keys() if a < b and a in graph[b]]
    assert mutual == []


def test_the_rooms_of_the_orchestrator_stand_on_their_floors() -> None:
    floors = {room: floor for floor, rooms in enumerate(ORCHESTRATOR_FLOORS) for room in rooms}
    wrong = []
    for module in sources():
        if module.package != "orchestrator" or module.name.count(".") < 2:
            continue
        room = module.name.split(".")[2]
        for i in module.imports:
            parts = i.dotted.split(".")
            if parts[:2] != ["gradus", "orchestrator"] or parts[2] == room:
                continue
            if floors[parts[2]] >= floors[room]:
                wrong.append(f"{short(module.path)}:{i.line} imports {i.dotted}")
    assert wrong == []


def test_there_are_no_relative_or_star_imports() -> None:
    wrong = [
        f"{short(module.path)}:{node.lineno}"
        for module in everything()
        for node in module.nodes
        if isinstance(node, ast.ImportFrom)
        and (node.level > 0 or any(alias.name == "*" for alias in node.names))
    ]
    assert wrong == []


def test_imports_stand_at_the_top_except_in_the_command_line() -> None:
    wrong = []
    for module in everything():
        if module.package == "cli":
            continue
        inner = {
            node.lineno
            for function in module.functions
            for node in ast.walk(function)
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        wrong += [
            f"{short(module.path)}:{i.line} {i.module}"
            for i in module.imports
            if i.line in inner and i.module.split(".")[0] != module.path.stem
        ]
    assert sorted(set(wrong)) == []


@pytest.mark.shows("F29", "SEC16", "SEC17", "SEC22", "SEC23")
def test_nothing_unsafe_is_called() -> None:
    wrong = []
    for module in everything():
        place = short(module.path)
        wrong += [
            f"{place}:{i.line} imports {i.module}"
            for i in module.imports
            if i.module.split(".")[0] in BANNED_MODULES and place != PICKLES_CODE
        ]
        for node in module.nodes:
            if isinstance(node, ast.Constant) and KILLS_BY_NAME.search(str(node.value)):
                wrong.append(f"{place}:{node.lineno} kills by name")
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Attribute) and node.func.attr in BANNED_METHODS:
                wrong.append(f"{place}:{node.lineno} calls {node.func.attr}")
            if isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
                wrong.append(f"{place}:{node.lineno} calls {node.func.id}")
            if tuple(ast.unparse(node.func).split(".")) in BANNED_ATTRIBUTES:
                wrong.append(f"{place}:{node.lineno} calls {ast.unparse(node.func)}")
            wrong += [
                f"{place}:{node.lineno} sets {k.arg}"
                for k in node.keywords
                if k.arg in BANNED_SWITCHES and ast.unparse(k.value) != "False"
            ]
    assert wrong == []


def test_every_module_opens_with_its_sentence() -> None:
    assert [short(m.path) for m in everything() if not ast.get_docstring(m.tree)] == []


def test_tests_use_few_mocks() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    tests = len(re.findall(r"^\s*(?:async )?def test_", text, re.M))
    mocks = len(re.findall(r"\b(?:Magic|Async)?Mock\(|\bpatch(?:\.object)?\(", text))
    assert mocks * 100 <= MAX_MOCKS_PER_HUNDRED_TESTS * tests


def test_tests_never_sleep() -> None:
    wrong = []
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text()
        if path == WAITS or "sleep" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr != "sleep":
                continue
            is_yield = [ast.unparse(a) for a in node.args] == ["0"]
            if ast.unparse(node.func.value) in {"time", "asyncio"} and not is_yield:
                wrong.append(f"{short(path)}:{node.lineno}")
    assert wrong == []


def tracked_text_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    binary = {".png", ".safetensors", ".msgpack"}
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and path.suffix not in binary]


def test_no_file_names_a_machine() -> None:
    pattern = re.compile(r"(?:^|[^A-Za-z0-9_.])/(?:work|farm|root)/")
    wrong = [
        f"{short(path)}:{number}"
        for path in tracked_text_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line) and path != Path(__file__).resolve()
    ]
    assert wrong == []


@pytest.mark.slow
def test_the_orchestrator_loads_neither_torch_nor_vllm() -> None:
    program = (
        "import sys, gradus.orchestrator.build, gradus.orchestrator.evaluation.process; "
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (result.stdout.strip(), result.returncode) == ("[]", 0), result.stderr


def test_the_changelog_says_what_the_first_release_holds_in_sixty_lines() -> None:
    """Later releases may add theirs."""
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 60
