"""Functions of a script or a notebook as files that other processes, and later commands, import.

A function of a module is imported by its name. One of a script, a notebook or another function is
copied as text, with what it uses: imports, its other functions and classes, plain values.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import functools
import linecache
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any, NoReturn

from gradus.errors import ConfigError

_LOADS = {"LOAD_GLOBAL", "LOAD_NAME"}
_PLAIN = (type(None), bool, int, float, str, bytes, list, tuple, dict, set)
_ADVICE = "put the function into a file, rewards.py, and import it: from rewards import ..."
_MOST_PARTS, _CHARACTERS_OF_A_PART = 200_000, 16
"""Most of a value that is copied as text; more is slow to write, and to read in each worker."""
_CACHED = functools._lru_cache_wrapper
_OF_MODULES = {"__name__", "__doc__", "__package__", "__loader__", "__spec__"}
"""What each module has of its own."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Definition = _Function | ast.ClassDef


def file_of(name: str, function: Callable[..., Any]) -> str:
    """The text of a module in which `name` is this function.

    ConfigError, which says what to do, where its text is not known or it uses what no text gives.
    """
    writer = _Writer(name)
    if _importable(function):
        writer.add_import(name, function)
    elif isinstance(inner := _uncached(function), FunctionType):
        writer.taken[name] = function
        writer.add_definition(name, function, beside=inner)
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
    """Name → what it means in the file, built-in ones too."""
    late: list[str] = field(default_factory=list)
    """Second names of what is defined above them."""
    pending: set[str] = field(default_factory=set)
    """Names whose definitions have begun: they come later than all that is written now."""

    def text(self) -> str:
        lines = [f'"""The reward {self.target!r}, as it was given to gradus."""', ""]
        lines += ["from __future__ import annotations", ""]
        if self.folders:
            lines += ["import sys", "", f"sys.path[:0] = {list(self.folders)!r}", ""]
        return (
            "\n".join(
                [*lines, *self.imports.values(), "", *self.parts.values(), *self.late]
            ).rstrip()
            + "\n"
        )

    def add(self, name: str, value: Any, where: FunctionType) -> None:
        """Whatever `name` means to a function."""
        if not self._is_new(name, value):
            return
        other = self._name_of(value, but=name)
        if isinstance(value, ModuleType):
            if value.__name__ == "__main__":
                self._refuse(f"it uses {name!r}, the script itself; {_ADVICE}")
            self._note_folder(value)
            self.imports[name] = f"import {value.__name__} as {name}"
        elif _importable(value):
            self.add_import(name, value)
        elif isinstance(_uncached(value), FunctionType | type) and other:
            if other in self.parts:
                self.parts[name] = f"{name} = {other}\n"
            else:
                self.pending.add(name)
                self.late.append(f"{name} = {other}\n")
        elif isinstance(_uncached(value), FunctionType | type):
            self.add_definition(name, value, beside=where)
        elif isinstance(value, re.Pattern):
            self.imports["re "] = "import re as _re"
            self.parts[name] = f"{name} = _re.compile({value.pattern!r}, {int(value.flags)})\n"
        elif isinstance(value, PurePath):
            self.imports["Path "] = "from pathlib import Path as _Path"
            self.parts[name] = f"{name} = _Path({str(Path(value).absolute())!r})\n"
        elif isinstance(value, list | dict | set) and other:
            self.parts[name] = f"{name} = {other}\n"
        elif _is_plain(value) and _is_large(value):
            self._refuse(
                f"it uses {name!r}, a {type(value).__name__} of {len(value):,}, too large to copy "
                f"as text: put it into a file that the function reads, or {_ADVICE}"
            )
        elif _is_plain(value):
            self.parts[name] = f"{name} = {_text_of(value)}\n"
        else:
            self._refuse(
                f"it uses {name!r}, a {type(value).__name__}, which no text can give to another "
                f"process: make it inside the function, or {_ADVICE}"
            )

    def _is_new(self, name: str, value: Any) -> bool:
        """Note what a name means; ConfigError where it means something else already."""
        if self.taken.get(name, value) is not value:
            self._refuse(f"two of its functions mean different things by {name!r}; {_ADVICE}")
        is_new = name not in self.taken
        self.taken[name] = value
        return is_new

    def _name_of(self, value: Any, *, but: str = "") -> str | None:
        """A name that the copy has for this very object."""
        return next((it for it, one in self.taken.items() if one is value and it != but), None)

    def add_import(self, name: str, value: Any) -> None:
        module, path = value.__module__, value.__qualname__
        self._note_folder(sys.modules[module])
        top, _, rest = path.partition(".")
        self.imports[name] = (
            f"import {module} as _{name}; {name} = _{name}.{path}"
            if rest
            else f"from {module} import {top} as {name}"
        )

    def add_definition(self, name: str, given: Any, *, beside: FunctionType) -> None:
        """A copy of a function, or of a class of the file of `beside`, after what it uses.

        Of a function without its decorators: what they made of it is another function, which is
        copied where it is used.
        """
        value = _uncached(given)
        functions = [value] if isinstance(value, FunctionType) else list(_methods_of(value))
        owner = next(iter(functions), beside)
        values = dict(owner.__globals__)
        for function in functions or [beside]:
            values |= _enclosed(function)
        lines = linecache.getlines(owner.__code__.co_filename, owner.__globals__)
        node = _definition(lines, value)
        if node is None:
            file = owner.__code__.co_filename
            self._refuse(f"the text of {_called(value)!r} is not known ({file}); {_ADVICE}")
        if _is_edited(lines, owner.__code__):
            self._refuse(
                f"the text of {_called(owner)!r} is not the one that was run; run it again, or "
                f"{_ADVICE}"
            )
        self.pending.add(name)
        if isinstance(node, ast.ClassDef):
            copy = _Copy.of_class(lines, node)
        else:
            copy = _Copy.of_function(lines, node, self._defaults(name, node, value, values))
        self._add_used(copy, given, values, owner)
        parts = [copy.text(name, owner.__code__.co_filename)]
        if copy.name not in {None, name} and copy.name not in self.pending:
            self._is_new(str(copy.name), given)
        if isinstance(node, ast.ClassDef):
            parts += self._fields(name, node, value, values)
        else:
            parts += self._attributes(name, value)
        if given is not value:
            self.imports["lru_cache "] = "from functools import lru_cache as _lru_cache"
            names = [it for it in {copy.name, name} if it and it not in self.pending - {name}]
            arguments = ", ".join(f"{k}={v!r}" for k, v in given.cache_parameters().items())
            parts.append(f"{' = '.join(sorted(names))} = _lru_cache({arguments})({name})\n")
        self.pending.discard(name)
        self.parts[name] = "".join(parts) + "\n"

    def _add_used(
        self, copy: _Copy, given: Any, values: dict[str, Any], owner: FunctionType
    ) -> None:
        """Add what a copy reads, and refuse one that would read something else."""
        code = owner.__code__
        try:
            tree = ast.parse(copy.code)
            used = dict.fromkeys(_names(tree))
        except SyntaxError as error:
            self._refuse(f"{_called(given)!r} means nothing on its own ({error.msg}); {_ADVICE}")
        # `super()` and `__private` names mean something only inside of their class.
        is_torn = "__class__" in code.co_freevars or not all(
            it in copy.body for it in code.co_names
        )
        if not isinstance(given, type) and is_torn:
            self._refuse(f"{_called(given)!r} needs the class in which it stands; {_ADVICE}")
        if isinstance(given, type) and type(given) is not type:  # pydantic reads annotations
            used.update(dict.fromkeys(_annotated(tree)))
        compared = (it for it in ast.walk(tree) if isinstance(it, ast.Compare))
        if any(getattr(it, "id", "") == "__name__" for one in compared for it in ast.walk(one)):
            self._refuse(f"{_called(given)!r} asks for '__name__', another one there; {_ADVICE}")
        for name in used:
            if name in _OF_MODULES:
                continue
            if name in values and not (name == copy.name and values[name] is given):
                self.add(name, values[name], owner)
            elif name in values:
                self._is_new(name, given)
            elif hasattr(builtins, name):
                self._is_new(name, getattr(builtins, name))
        for module in _submodules(tree, values):
            self.imports[f"{module} "] = f"import {module} as _module"

    def _defaults(
        self, name: str, node: _Function, function: FunctionType, values: dict[str, Any]
    ) -> dict[ast.expr, str]:
        """What to write in place of defaults that the text alone does not give: a loop's variable,
        a name that was given another value since."""
        written = {}
        pairs = _default_pairs(node, function)
        if pairs is None:
            self._refuse(f"the defaults of {_called(function)!r} were changed; {_ADVICE}")
        for number, (expression, value) in enumerate(pairs):
            if _gives(expression, value, values):
                continue
            if _is_plain(value):
                written[expression] = _text_of(value)
            else:
                written[expression] = f"_{name}_default_{number}"
                self.add(written[expression], value, function)
        return written

    def _attributes(self, name: str, function: FunctionType) -> list[str]:
        """Lines that give a copy what was put on its function, as functools.wraps does."""
        lines = []
        for key, value in vars(function).items():
            if key == "__wrapped__":
                other = self._name_of(value, but=name) or f"_{name}_wrapped"
                self.add(other, value, function)
                lines.append(f"{name}.__wrapped__ = {other}\n")
            elif _is_plain(value):
                lines.append(f"setattr({name}, {key!r}, {_text_of(value)})\n")
            else:
                self._refuse(
                    f"{_called(function)!r} has an attribute {key!r}, a {type(value).__name__}, "
                    f"which no text can give to another process; {_ADVICE}"
                )
        return lines

    def _fields(
        self, name: str, node: ast.ClassDef, kind: type, values: dict[str, Any]
    ) -> list[str]:
        """Lines that give a class the values of now, where its text may give others; refused where
        they went into its methods."""
        lines = []
        is_simple = type(kind) is type and not node.decorator_list and not hasattr(kind, "_fields")
        own = {*kind.__bases__, *getattr(kind, "__orig_bases__", ())}
        changed = [
            base.id
            for base in node.bases
            if isinstance(base, ast.Name)
            and isinstance(values.get(base.id), type)
            and values[base.id] not in own
        ]
        for part in node.body:
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                method = vars(kind).get(part.name)
                method = getattr(method, "__func__", method)
                if not isinstance(method, FunctionType) or hasattr(method, "__wrapped__"):
                    continue
                pairs = _default_pairs(part, method)
                first = part.decorator_list or method.__code__.co_firstlineno == part.lineno
                if not (first and pairs is not None and all(_gives(*it, values) for it in pairs)):
                    changed.append(part.name)
            elif isinstance(part, ast.Assign | ast.AnnAssign) and part.value is not None:
                targets = part.targets if isinstance(part, ast.Assign) else [part.target]
                names = [it.id for it in targets if isinstance(it, ast.Name)]
                now = {it: vars(kind)[it] for it in names if _is_plain(vars(kind).get(it, ...))}
                other = [it for it in now if not _gives(part.value, now[it], values)]
                if not is_simple:
                    changed += other
                lines += [f"{name}.{it} = {_text_of(now[it])}\n" for it in other]
        if changed:
            self._refuse(
                f"{changed[0]!r} of the class {kind.__name__!r} may have another value there; "
                f"{_ADVICE}"
            )
        return lines

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


def _uncached(value: Any) -> Any:
    """The function that lru_cache was put around."""
    return value.__wrapped__ if isinstance(value, _CACHED) else value


def _enclosed(function: FunctionType) -> dict[str, Any]:
    """What a function takes from the functions around it."""
    closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {key: cell.cell_contents for key, cell in closure if _is_filled(cell)}


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


def _methods_of(kind: type) -> Iterator[FunctionType]:
    """Methods, whose file is that of their class; dataclasses and others add some of theirs."""
    for member in vars(kind).values():
        it = getattr(member, "__func__", getattr(member, "fget", member))
        if isinstance(it, FunctionType):
            file, names = it.__code__.co_filename, it.__qualname__.split(".")
            if file != "<string>" and not _is_installed(Path(file)) and kind.__name__ in names:
                yield it


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
    if isinstance(value, type):
        return _class_of(tree, value)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(it.lineno for it in node.decorator_list)])
            if (node.name, first) == (value.__code__.co_name, value.__code__.co_firstlineno):
                return node
    return None


def _is_edited(lines: list[str], code: CodeType) -> bool:
    """Whether a file no longer has the text of a code, as it was saved since."""
    flags = code.co_flags & __import__("__future__").annotations.compiler_flag
    flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        waiting = [compile("".join(lines), code.co_filename, "exec", flags, dont_inherit=True)]
    except (SyntaxError, ValueError):
        return False
    for one in waiting:
        waiting += [it for it in one.co_consts if isinstance(it, CodeType)]
    return code not in waiting


def _class_of(tree: ast.Module, kind: type) -> ast.ClassDef | None:
    """The class of this name; of several that in which its method stands."""
    named = (it for it in ast.walk(tree) if isinstance(it, ast.ClassDef))
    found = [it for it in named if it.name == kind.__name__]
    if method := next(_methods_of(kind), None):
        line = method.__code__.co_firstlineno
        found = [it for it in found if it.lineno <= line <= (it.end_lineno or 0)]
    return found[0] if len(found) == 1 else None


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


def _default_pairs(node: _Function, function: FunctionType) -> list[tuple[ast.expr, Any]] | None:
    """Each default as it is written, with its value; None where there are not as many."""
    after = function.__kwdefaults__ or {}
    named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    written = {argument.arg: it for argument, it in named if it is not None}
    values = function.__defaults__ or ()
    if len(values) != len(node.args.defaults) or written.keys() != after.keys():
        return None
    pairs = list(zip(node.args.defaults, values, strict=True))
    return pairs + [(written[it], after[it]) for it in written]


def _gives(expression: ast.expr, value: Any, values: dict[str, Any]) -> bool:
    """Whether an expression, read now, surely gives this value."""
    if isinstance(expression, ast.Name):
        missing = getattr(builtins, expression.id, _CACHED)
        return values.get(expression.id, missing) is value
    try:
        found = ast.literal_eval(expression)
    except (ValueError, TypeError, SyntaxError):
        return False
    return type(found) is type(value) and repr(found) == repr(value)


def _names(tree: ast.Module) -> Iterator[str]:
    """Global names that a definition reads, with those of decorators and defaults."""
    flags = __import__("__future__").annotations.compiler_flag
    waiting: list[CodeType] = [compile(tree, "<names>", "exec", flags, dont_inherit=True)]
    while waiting:
        code = waiting.pop()
        waiting += [it for it in code.co_consts if isinstance(it, CodeType)]
        for instruction in dis.get_instructions(code):
            if instruction.opname in _LOADS:
                yield instruction.argval


def _annotated(tree: ast.Module) -> Iterator[str]:
    """Names in the annotations of a class's fields, of those in quotes too."""
    for field_ in (it for it in ast.walk(tree) if isinstance(it, ast.AnnAssign)):
        waiting: list[ast.AST] = [field_.annotation]
        while waiting:
            for node in ast.walk(waiting.pop()):
                if isinstance(node, ast.Name):
                    yield node.id
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    with contextlib.suppress(SyntaxError, ValueError):
                        waiting.append(ast.parse(node.value, mode="eval"))


def _submodules(tree: ast.Module, values: dict[str, Any]) -> Iterator[str]:
    """Modules that a definition reaches by the name of a package: `xml.etree.ElementTree`."""
    for node in ast.walk(tree):
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path.insert(0, node.attr)
            node = node.value
        if path and isinstance(node, ast.Name) and isinstance(values.get(node.id), ModuleType):
            module = ".".join([values[node.id].__name__, *path])
            if module in sys.modules:
                yield module


@dataclass(frozen=True)
class _Copy:
    """The text of a definition, as it may stand in another file."""

    name: str | None
    """Which it gives what it defines; None of a lambda."""
    line: int
    """Where it begins in its file."""
    body: str

    @classmethod
    def of_class(cls, lines: list[str], node: ast.ClassDef) -> _Copy:
        first = min([node.lineno, *(it.lineno for it in node.decorator_list)])
        return cls(node.name, first, "".join(lines[first - 1 : node.end_lineno]).rstrip())

    @classmethod
    def of_function(cls, lines: list[str], node: _Function, defaults: dict[ast.expr, str]) -> _Copy:
        """Without decorators, and with other texts for some of its defaults."""
        data = [line.encode() for line in lines]

        def place(line: int | None, column: int | None) -> int:
            return sum(map(len, data[: (line or 1) - 1])) + (column or 0)

        end = place(node.end_lineno, node.end_col_offset)
        text = b"".join(data)[:end]
        for it in sorted(defaults, key=lambda it: (it.lineno, it.col_offset), reverse=True):
            first, last = place(it.lineno, it.col_offset), place(it.end_lineno, it.end_col_offset)
            padding = "\n" * text[first:last].count(b"\n")  # the lines after it stay where they are
            text = text[:first] + f"{defaults[it]}{padding}".encode() + text[last:]
        if isinstance(node, ast.Lambda):
            return cls(None, node.lineno, text[place(node.lineno, node.col_offset) :].decode())
        return cls(node.name, node.lineno, text[place(node.lineno, 0) :].decode())

    @property
    def is_indented(self) -> bool:
        return self.body[:1].isspace()

    @property
    def code(self) -> str:
        """What defines it, under its own name."""
        if self.name is None:
            return f"(\n{self.body}\n)"
        return f"if True:\n{self.body}" if self.is_indented else self.body

    def text(self, name: str, file: str) -> str:
        """What defines it as `name`, under a comment that says where it comes from."""
        origin = f"# copied from {file}, line"
        if self.name is None and "\n" in self.body:
            return f"{origin} {self.line - 1}\n{name} = (\n{self.body}\n)\n"
        if self.name is None:
            return f"{origin} {self.line}\n{name} = {self.body}\n"
        text = f"{origin} {self.line}\n{self.body}\n"
        text = f"if True:\n{text}" if self.is_indented else text
        return text if self.name == name else f"{text}\n\n{name} = {self.name}\n"


def _is_large(value: Any) -> bool:
    """Whether a plain value has too many parts, or characters, to be written as text."""
    waiting, num_parts = [value], 0
    while waiting and num_parts <= _MOST_PARTS:
        it = waiting.pop()
        num_parts += 1
        if isinstance(it, str | bytes):
            num_parts += len(it) // _CHARACTERS_OF_A_PART
        elif isinstance(it, list | tuple | set | dict):
            if len(it) > _MOST_PARTS:
                return True
            waiting += [*it, *it.values()] if isinstance(it, dict) else it
    return num_parts > _MOST_PARTS


def _text_of(value: Any) -> str:
    """A plain value as text; a set in the same order each time."""
    if type(value) is set and value:
        return f"{{{', '.join(sorted(map(repr, value)))}}}"
    return repr(value)
