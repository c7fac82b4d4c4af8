"""The modules of a source tree, parsed once, with what the architecture limits.

- Folders: the Python files in a folder, its `__init__` not counted.
- Modules that one other imports: a name that a package's `__init__` only hands on is followed to
  the module that defines it, and the `__init__` itself is no importer. A string "gradus.a.b" or
  "gradus.a.b:Class" imports that module.
- Names from config: what other packages import from anywhere in `gradus.config`. `gradus.plan` is
  left out: it reads every section of a config to see whether a machine has what it asks for.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

MODULE_IN_STRING = re.compile(r"gradus(?:_[a-z]+)?(?:\.[a-z_0-9]+)+(?=:\w+$|$)")


@dataclass(frozen=True)
class Import:
    """One name that a module imports: `from gradus.wire.sample import Sample`, or a module."""

    module: str
    name: str | None
    line: int

    @property
    def dotted(self) -> str:
        """The module with the name, which may itself be a module."""
        return f"{self.module}.{self.name}" if self.name else self.module


@dataclass(frozen=True)
class Module:
    """A parsed source file."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree, walked once."""
        return list(ast.walk(self.tree))

    @cached_property
    def lines(self) -> int:
        """Lines of the file."""
        return self.text.count("\n")

    @cached_property
    def is_package(self) -> bool:
        """Whether this is the `__init__` of a package."""
        return self.path.name == "__init__.py"

    @cached_property
    def package(self) -> str | None:
        """The package below gradus that owns it; None for the modules at the top."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 2 or (self.is_package and len(parts) == 2) else None

    @cached_property
    def imports(self) -> list[Import]:
        """Everything that it imports, wherever the statement stands."""
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [Import(alias.name, None, node.lineno) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found += [Import(node.module, alias.name, node.lineno) for alias in node.names]
        return found

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Every function and method, also inner ones."""
        return [n for n in self.nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]

    @cached_property
    def strings(self) -> list[str]:
        """Every string constant, docstrings included."""
        return [
            node.value
            for node in self.nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]

    @cached_property
    def public_classes(self) -> list[str]:
        """Classes at the top of the module whose name does not begin with `_`."""
        return [
            node.name
            for node in self.tree.body
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        ]


class Tree:
    """The modules of packages of a checkout, each read and parsed once."""

    def __init__(self, root: Path, *sources: str) -> None:
        self.root = root
        self.sources = [root / source for source in sources or ("src/gradus",)]
        self.modules = {module.name: module for module in self._parse()}

    def _parse(self) -> Iterator[Module]:
        for source in self.sources:
            for path in sorted(source.rglob("*.py")):
                text = path.read_text(encoding="utf-8")
                parts = path.relative_to(source.parent).with_suffix("").parts
                name = ".".join(parts).removesuffix(".__init__")
                yield Module(name, path, text, ast.parse(text, filename=str(path)))

    def __iter__(self) -> Iterator[Module]:
        return iter(self.modules.values())

    @cached_property
    def files_per_folder(self) -> dict[str, int]:
        """Files in each folder of the source, without its `__init__`."""
        folders = [m.path.parent.relative_to(self.root) for m in self if not m.is_package]
        return dict(sorted(Counter(str(folder) for folder in folders).items()))

    def _home(self, dotted: str) -> str | None:
        """The module that owns a dotted name, through every `__init__` that hands it on."""
        if dotted in self.modules:
            return dotted
        package, _, name = dotted.rpartition(".")
        if package not in self.modules:
            return None
        for handed_on in self.modules[package].imports if self.modules[package].is_package else []:
            if handed_on.name == name:
                return self._home(handed_on.dotted)
        return package

    @cached_property
    def importers(self) -> dict[str, set[str]]:
        """Modules that import each module; a package that only hands a name on is none."""
        found: dict[str, set[str]] = defaultdict(set)
        for module in self:
            named = [m for s in module.strings for m in MODULE_IN_STRING.findall(s)]
            homes = {self._home(name) for name in [*(i.dotted for i in module.imports), *named]}
            if not module.is_package or self._does_something(module):
                for home in homes - {None, module.name}:
                    found[str(home)].add(module.name)
        return found

    @staticmethod
    def _does_something(module: Module) -> bool:
        """Whether an `__init__` has functions, classes or tables, and not only imports."""
        plain = ast.Import | ast.ImportFrom | ast.Expr
        names = [s for s in module.tree.body if not isinstance(s, plain)]
        return any("__all__" not in ast.unparse(statement) for statement in names)

    @cached_property
    def imported_by_one(self) -> dict[str, str]:
        """Modules, packages left out, with the single other module that imports each."""
        return {
            name: next(iter(importers))
            for name, importers in sorted(self.importers.items())
            if len(importers) == 1 and not self.modules[name].is_package
        }

    @cached_property
    def names_from_config(self) -> dict[str, set[str]]:
        """Names that other packages import from config, with the modules they take them from."""
        names: dict[str, set[str]] = defaultdict(set)
        for module in self:
            if module.package not in {"config", "plan"}:
                for i in module.imports:
                    if i.module.split(".")[:2] == ["gradus", "config"]:
                        names[i.name or i.module].add(i.module)
        return names

    @cached_property
    def classes_defined_twice(self) -> dict[str, list[str]]:
        """Public class names that more than one module defines."""
        homes: dict[str, list[str]] = defaultdict(list)
        for module in self:
            for name in module.public_classes:
                homes[name].append(module.name)
        return {name: found for name, found in sorted(homes.items()) if len(found) > 1}
