"""The limits and the dependency rule of the architecture, measured on the tree."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "gradus"
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 7
MAX_MOCKS_PER_HUNDRED_TESTS = 5

TOP_LEVEL = {
    "closing",
    "collector",
    "companions",
    "errors",
    "log",
    "run_dir",
    "lease",
    "supervise",
    "death_watch",
    "log_tail",
    "liveness",
    "plugins",
    "process_table",
    "durable",
    "checkpoints",
    "recording",
    "rewind",
}
DOORS = {"__init__": {"launch"}, "__main__": {"cli"}}
"""What `import gradus` offers on first use, and what `python -m gradus` runs."""
ROLES = {"orchestrator", "trainer", "inference"}
MAY_IMPORT: dict[str, set[str]] = {
    "wire": set(),
    "config": set(),
    "transport": {"wire", "config"},
    "weights": {"wire", "config"},
    "monitor": {"wire", "config"},
    "environments": {"wire", "config"},
    "orchestrator": {"wire", "config", "transport", "monitor"},
    "trainer": {"wire", "config", "transport", "weights", "monitor"},
    "inference": {"wire", "config", "weights"},
    # The launcher prints the steps that the orchestrator records, with the monitor's own words.
    "launch": {"config", "monitor"},
    # The scripted engine verifies published weights by the same manifest as the real one.
    "testing": {"wire", "config", "transport", "monitor", "weights"},
    # `gradus init` writes the tiny model that the tests build.
    "cli": {
        *("wire", "config", "transport", "weights", "monitor", "environments", "launch"),
        *("testing", *ROLES),
    },
}
HEAVY = {"torch", "transformers", "verifiers", "vllm", "renderers", "peft", "zmq", "wandb"}
MAY_IMPORT_HEAVY: dict[str, set[str]] = {
    "transport": {"zmq"},
    "weights": {"torch"},
    "environments": {"verifiers", "renderers", "zmq"},
    "orchestrator": {"verifiers", "renderers", "zmq"},
    "trainer": {"torch", "transformers", "peft"},
    "inference": {"vllm", "torch", "transformers"},
    "testing": {"verifiers", "renderers", "torch", "transformers", "zmq"},
}
BANNED_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
BANNED_CALLS = {"eval", "exec"}
BANNED_ATTRIBUTES = {("torch", "load"), ("yaml", "load"), ("os", "system")}


def sources() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def package_of(path: Path) -> str | None:
    """The package below gradus that owns a file; None for the helpers at the top."""
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else None


def imported_modules(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def gradus_packages(path: Path) -> dict[str, int]:
    """Packages of gradus that a file imports, with a line each."""
    found: dict[str, int] = {}
    for module, line in imported_modules(parse(path)):
        parts = module.split(".")
        if parts[0] == "gradus" and len(parts) > 1 and parts[1] in MAY_IMPORT:
            found.setdefault(parts[1], line)
    return found


def test_files_are_short() -> None:
    long = [
        f"{short(p)}: {n}" for p in sources() if (n := p.read_text().count("\n")) > MAX_FILE_LINES
    ]
    assert long == []


def test_functions_are_short() -> None:
    long = [
        f"{short(path)}:{f.lineno} {f.name}: {lines}"
        for path in sources()
        for f in functions(parse(path))
        if (lines := (f.end_lineno or f.lineno) - f.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_functions_take_few_parameters() -> None:
    many = []
    for path in sources():
        for function in functions(parse(path)):
            arguments = function.args
            names = [a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]
            count = len([name for name in names if name not in {"self", "cls"}])
            if count > MAX_PARAMETERS:
                many.append(f"{short(path)}:{function.lineno} {function.name}: {count}")
    assert many == []


def test_every_argument_and_return_has_a_type() -> None:
    untyped = []
    for path in sources():
        for function in functions(parse(path)):
            a = function.args
            arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
            missing = [
                x.arg
                for x in arguments
                if x is not None and x.annotation is None and x.arg not in {"self", "cls"}
            ]
            if missing or function.returns is None:
                untyped.append(f"{short(path)}:{function.lineno} {function.name} {missing}")
    assert untyped == []


def test_packages_and_top_level_helpers_are_the_listed_ones() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    helpers = {path.stem for path in SOURCE.glob("*.py")} - DOORS.keys()
    assert (packages, helpers) == (set(MAY_IMPORT), TOP_LEVEL)


def test_packages_import_only_what_the_rule_allows() -> None:
    wrong = []
    for path in sources():
        owner = package_of(path)
        allowed = MAY_IMPORT[owner] | {owner} if owner else DOORS.get(path.stem, set())
        wrong += [
            f"{short(path)}:{line} imports gradus.{package}"
            for package, line in gradus_packages(path).items()
            if package not in allowed
        ]
    assert wrong == []


def test_heavy_libraries_are_imported_only_where_the_rule_allows() -> None:
    wrong = []
    for path in sources():
        owner = package_of(path)
        allowed = HEAVY if owner == "cli" else MAY_IMPORT_HEAVY.get(owner or "", set())
        for module, line in imported_modules(parse(path)):
            root = module.split(".")[0]
            if root in HEAVY and root not in allowed and path.stem != root:
                wrong.append(f"{short(path)}:{line} imports {root}")
    assert sorted(set(wrong)) == []


def test_no_two_modules_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for path in sources():
        name = ".".join(("gradus", *path.relative_to(SOURCE).with_suffix("").parts))
        graph[name.removesuffix(".__init__")] = {m for m, _ in imported_modules(parse(path))}
    mutual = [(a, b) for a in graph for b in graph[a] & graph.keys() if a < b and a in graph[b]]
    assert mutual == []


def test_there_are_no_relative_or_star_imports() -> None:
    wrong = [
        f"{short(path)}:{node.lineno}"
        for path in sources()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ImportFrom)
        and (node.level > 0 or any(alias.name == "*" for alias in node.names))
    ]
    assert wrong == []


def test_imports_stand_at_the_top_except_in_the_command_line() -> None:
    wrong = []
    for path in sources():
        if package_of(path) == "cli":
            continue
        for function in functions(parse(path)):
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    modules = [module for module, _ in imported_modules(node)]
                    if not any(module.split(".")[0] == path.stem for module in modules):
                        wrong.append(f"{short(path)}:{node.lineno} {modules[0]}")
    assert sorted(set(wrong)) == []


def test_nothing_unsafe_is_called() -> None:
    wrong = []
    for path in sources():
        tree = parse(path)
        wrong += [
            f"{short(path)}:{line} imports {module}"
            for module, line in imported_modules(tree)
            if module.split(".")[0] in BANNED_MODULES
        ]
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
                wrong.append(f"{short(path)}:{node.lineno} calls {node.func.id}")
            if tuple(ast.unparse(node.func).split(".")) in BANNED_ATTRIBUTES:
                wrong.append(f"{short(path)}:{node.lineno} calls {ast.unparse(node.func)}")
            if any(k.arg == "shell" and ast.unparse(k.value) == "True" for k in node.keywords):
                wrong.append(f"{short(path)}:{node.lineno} uses a shell")
    assert wrong == []


def test_every_module_opens_with_its_sentence() -> None:
    assert [short(path) for path in sources() if not ast.get_docstring(parse(path))] == []


def test_tests_use_few_mocks() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    tests = len(re.findall(r"^\s*(?:async )?def test_", text, re.M))
    mocks = len(re.findall(r"\b(?:Magic|Async)?Mock\(|\bpatch(?:\.object)?\(", text))
    assert mocks * 100 <= MAX_MOCKS_PER_HUNDRED_TESTS * tests


def test_tests_never_sleep() -> None:
    wrong = []
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(parse(path)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            is_yield = [ast.unparse(a) for a in node.args] == ["0"]
            owner = ast.unparse(node.func.value)
            if node.func.attr == "sleep" and owner in {"time", "asyncio"} and not is_yield:
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


def test_the_orchestrator_loads_neither_torch_nor_vllm() -> None:
    program = (
        "import sys, gradus.orchestrator.orchestrator, gradus.orchestrator.sft_evaluator; "
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (result.stdout.strip(), result.returncode) == ("[]", 0), result.stderr
