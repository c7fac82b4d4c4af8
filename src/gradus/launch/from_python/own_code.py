"""Functions of a script or a notebook as files that other processes, and later commands, import.

A function of a module is imported by its name. One of a script, a notebook or another function is
copied as text, with what it uses: imports, its other functions and classes, plain values.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import linecache
import re
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any, NoReturn

from gradus.errors import ConfigError

_LOADS = {"LOAD_GLOBAL", "LOAD_NAME"}
_PLAIN = (type(None), bool, int, float, str, bytes, list, tuple, dict, set)
_ADVICE = "put the function into a file, rewards.py, and import it: from rewards import ..."
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


def file_of(name: str, function: Callable[..., Any]) -> str:
    """The text of a module in which `name` is this function.

    ConfigError, which says what to do, where its text is not known or it uses what no text gives.
    """
    writer = _Writer(name)
    if _importable(function):
        writer.add_import(name, function)
    elif isinstance(inner := _unwrapped(function), FunctionType):
        writer.add_definition(name, inner, beside=inner)
    else:
        raise ConfigError(
            f"reward {name!r} is a {type(function).__name__}; write a function (def or lambda)"
        )
    return writer.text()


@dataclass
class _Writer:
    """Collects what one function needs, in the order in which a module must have it."""

    target: str
    """The function that is written, for errors."""
    folders: dict[str, None] = field(default_factory=dict)
    """Where modules of the user's own lie."""
    imports: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    """Name → text of its definition; those that it needs come first."""
    taken: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        lines = [f'"""The reward {self.target!r}, as it was given to gradus."""', ""]
        lines += ["from __future__ import annotations", ""]
        if self.folders:
            lines += ["import sys", "", f"sys.path[:0] = {list(self.folders)!r}", ""]
        return "\n".join([*lines, *self.imports.values(), "", *self.parts.values()]).rstrip() + "\n"

    def add(self, name: str, value: Any, where: FunctionType) -> None:
        """Whatever `name` means to a function."""
        if name in self.taken:
            if self.taken[name] is not value:
                self._refuse(f"two of its functions mean different things by {name!r}")
            return
        self.taken[name] = value
        if isinstance(value, ModuleType):
            self._note_folder(value)
            self.imports[name] = f"import {value.__name__} as {name}"
        elif _importable(value):
            self.add_import(name, value)
        elif isinstance(value, FunctionType | type) or hasattr(value, "__wrapped__"):
            self.add_definition(name, _unwrapped(value), beside=where)
        elif isinstance(value, re.Pattern):
            self.imports["re "] = "import re as _re"
            self.parts[name] = f"{name} = _re.compile({value.pattern!r}, {int(value.flags)})\n"
        elif isinstance(value, PurePath):
            self.imports["Path "] = "from pathlib import Path as _Path"
            self.parts[name] = f"{name} = _Path({str(Path(value).absolute())!r})\n"
        elif type(value) is set and value and _is_plain(value):  # in the same order each time
            self.parts[name] = f"{name} = {{{', '.join(sorted(map(repr, value)))}}}\n"
        elif _is_plain(value):
            self.parts[name] = f"{name} = {value!r}\n"
        else:
            self._refuse(
                f"it uses {name!r}, a {type(value).__name__}, which no text can give to another "
                f"process: make it inside the function, or {_ADVICE}"
            )

    def add_import(self, name: str, value: Any) -> None:
        module, path = value.__module__, value.__qualname__
        self._note_folder(sys.modules[module])
        top, _, rest = path.partition(".")
        self.imports[name] = (
            f"import {module} as _{name}; {name} = _{name}.{path}"
            if rest
            else f"from {module} import {top} as {name}"
        )

    def add_definition(self, name: str, value: Any, *, beside: FunctionType) -> None:
        """A copy of a function, or of a class of the file of `beside`, after what it uses."""
        owner = value if isinstance(value, FunctionType) else _method_of(value) or beside
        closure = zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True)
        enclosed = {key: cell.cell_contents for key, cell in closure if _is_filled(cell)}
        values = {**owner.__globals__, **enclosed}
        self.taken[name] = value
        file = owner.__code__.co_filename
        lines = linecache.getlines(file, owner.__globals__)
        node = _definition(lines, value)
        if node is None:
            self._refuse(f"the text of {_called(value)!r} is not known ({file}); {_ADVICE}")
        for used in _names(node):
            if used in values and used != _called(value):
                self.add(used, values[used], owner)
        self.parts[name] = _copied(lines, node, name, file)

    def _note_folder(self, module: ModuleType) -> None:
        """The folder from which a module of the user's own is imported."""
        file = getattr(module, "__file__", None)
        if file is None or _is_installed(Path(file)):
            return
        path = Path(file).resolve()
        depth = module.__name__.count(".") + (path.stem == "__init__")
        self.folders[str(path.parents[depth])] = None

    def _refuse(self, reason: str) -> NoReturn:
        raise ConfigError(
            f"reward {self.target!r} cannot reach the process that calls it: {reason}"
        )


def _importable(value: Any) -> bool:
    """Whether another process gets the same object by `from module import name`."""
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str) or module == "__main__":
        return False
    found: Any = sys.modules.get(module)
    if getattr(found, "__spec__", None) is None:
        return False
    for part in path.split("."):
        found = getattr(found, part, None)
    return found is value


def _unwrapped(value: Any) -> Any:
    """What decorators that keep `__wrapped__` were put around."""
    if isinstance(value, functools.partial):
        return value
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  an empty cell raises
    except ValueError:
        return False
    return True


def _is_plain(value: Any) -> bool:
    """Whether its text gives it back; a subclass may print anything."""
    if type(value) not in _PLAIN:
        return False
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return repr(value) == "set()"


def _is_installed(path: Path) -> bool:
    places = sysconfig.get_paths()
    roots = {Path(places[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(root in path.parents for root in roots) or "site-packages" in path.parts


def _method_of(kind: Any) -> FunctionType | None:
    """A method, whose file is that of its class."""
    members = (it for it in vars(kind).values() if isinstance(it, FunctionType))
    named = (it for it in members if not it.__code__.co_filename.startswith("<string>"))
    return next(named, None)


def _called(value: Any) -> str:
    return str(getattr(value, "__name__", value))


def _definition(lines: list[str], value: Any) -> _Definition | None:
    """Where a file defines a function, by its first line, or a class, by its name."""
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return None
    if isinstance(value, FunctionType) and value.__code__.co_name == "<lambda>":
        return _lambda_of(tree, value.__code__)
    for node in ast.walk(tree):
        if isinstance(value, type):
            if isinstance(node, ast.ClassDef) and node.name == value.__name__:
                return node
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(it.lineno for it in node.decorator_list)])
            if (node.name, first) == (value.__code__.co_name, value.__code__.co_firstlineno):
                return node
    return None


def _lambda_of(tree: ast.Module, code: CodeType) -> ast.Lambda | None:
    """The lambda of this code; several may stand in one line, or in each other."""
    positions = ((line, column) for line, _, column, _ in code.co_positions())
    first = (code.co_firstlineno, 0)  # where code begins, whatever stands there
    places = {(line, column) for line, column in positions if None not in (line, column)} - {first}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda) and node.lineno == code.co_firstlineno:
            start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
            if all(start <= place < end for place in places):
                found.append(node)
    if not places:  # Python 3.12 gives a lambda that only gives a constant none
        found = [it for it in found if _constant(it.body) == code.co_consts[-1:]]
        return next(iter(found), None)
    begun = (it for it in found if (it.body.lineno, it.body.col_offset) in places)
    return found[0] if len(found) == 1 else next(begun, None)


def _constant(body: ast.expr) -> tuple[Any, ...]:
    """The constant that an expression is, alone; nothing where it is none."""
    try:
        return (ast.literal_eval(body),)
    except ValueError:
        return ()


def _names(node: _Definition) -> Iterator[str]:
    """Global names that a definition reads, with those of decorators and defaults."""
    body: list[ast.stmt] = [ast.Expr(node)] if isinstance(node, ast.Lambda) else [node]
    module = ast.fix_missing_locations(ast.Module(body, []))
    flags = __import__("__future__").annotations.compiler_flag
    waiting: list[CodeType] = [compile(module, "<names>", "exec", flags, dont_inherit=True)]
    while waiting:
        code = waiting.pop()
        waiting += [it for it in code.co_consts if isinstance(it, CodeType)]
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if instruction.opname in _LOADS and not hasattr(builtins, name):
                yield name


def _copied(lines: list[str], node: _Definition, name: str, file: str) -> str:
    """The text of a definition, under a comment that says where it comes from."""
    decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
    first = min([node.lineno, *(it.lineno for it in decorators)])
    if isinstance(node, ast.Lambda):
        text = f"{name} = {ast.get_source_segment(''.join(lines), node)}"
        if "\n" in text:
            text = f"{name} = (\n{ast.get_source_segment(''.join(lines), node)}\n)"
            first -= 1
    else:
        text = textwrap.dedent("".join(lines[first - 1 : node.end_lineno])).rstrip()
        if node.name != name:
            text += f"\n\n\n{name} = {node.name}"
    return f"# copied from {file}, line {first}\n{text}\n\n"
