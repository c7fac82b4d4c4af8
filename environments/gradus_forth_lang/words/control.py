"""Chapters `control` and `defining`: branches, loops, errors, and new words."""

from __future__ import annotations

from gradus_forth_lang.machine import (
    CELL,
    Definition,
    ForthError,
    Loop,
    Machine,
    Op,
    Word,
    signed,
)
from gradus_forth_lang.words.text import pop_text
from gradus_forth_lang.words.vocabulary import Vocabulary

CONTROL = Vocabulary("control")
DEFINING = Vocabulary("defining")
_ABORTED = -2


def _jump(target: int) -> Op:
    def run(machine: Machine) -> None:
        machine.position = target

    return run


def _jump_if_false(target: int) -> Op:
    def run(machine: Machine) -> None:
        if not machine.pop():
            machine.position = target

    return run


def _unfilled(machine: Machine) -> None:  # noqa: ARG001
    """Stands where a jump comes, until its target is known."""
    raise ForthError("a jump has no target", -22)


def _reserve(machine: Machine) -> int:
    code = machine.compiling.code
    code.append(_unfilled)
    return len(code) - 1


def _close(machine: Machine, name: str, *kinds: str) -> tuple[str, list[int]]:
    control = machine.compiling.control
    if not control or control[-1][0] not in kinds:
        raise ForthError(f"{name} has no {' or '.join(kinds)}", -22)
    return control.pop()


def _open(machine: Machine, kind: str, *places: int) -> None:
    machine.compiling.control.append((kind, list(places)))


@CONTROL.word(
    "IF",
    "flag --",
    "Go on when the flag is not 0, else at ELSE or THEN.",
    immediate=True,
    inside=True,
)
def _if(machine: Machine) -> None:
    _open(machine, "IF", _reserve(machine))


@CONTROL.word("ELSE", "--", "What is done when the flag of IF was 0.", immediate=True, inside=True)
def _else(machine: Machine) -> None:
    _, (place,) = _close(machine, "ELSE", "IF")
    end = _reserve(machine)
    machine.compiling.code[place] = _jump_if_false(len(machine.compiling.code))
    _open(machine, "ELSE", end)


@CONTROL.word("THEN", "--", "The end of IF.", immediate=True, inside=True)
def _then(machine: Machine) -> None:
    kind, (place,) = _close(machine, "THEN", "IF", "ELSE")
    code = machine.compiling.code
    code[place] = (_jump if kind == "ELSE" else _jump_if_false)(len(code))


@CONTROL.word(
    "BEGIN", "--", "Where UNTIL, REPEAT and AGAIN go back to.", immediate=True, inside=True
)
def _begin(machine: Machine) -> None:
    _open(machine, "BEGIN", len(machine.compiling.code))


@CONTROL.word(
    "UNTIL", "flag --", "Go back to BEGIN until the flag is not 0.", immediate=True, inside=True
)
def _until(machine: Machine) -> None:
    _, (start,) = _close(machine, "UNTIL", "BEGIN")
    machine.compiling.code.append(_jump_if_false(start))


@CONTROL.word(
    "AGAIN", "--", "Go back to BEGIN for ever; EXIT ends it.", immediate=True, inside=True
)
def _again(machine: Machine) -> None:
    _, (start,) = _close(machine, "AGAIN", "BEGIN")
    machine.compiling.code.append(_jump(start))


@CONTROL.word(
    "WHILE",
    "flag --",
    "Leave the loop of BEGIN and REPEAT when the flag is 0.",
    immediate=True,
    inside=True,
)
def _while(machine: Machine) -> None:
    _, (start,) = _close(machine, "WHILE", "BEGIN")
    _open(machine, "WHILE", start, _reserve(machine))


@CONTROL.word("REPEAT", "--", "Go back to BEGIN.", immediate=True, inside=True)
def _repeat(machine: Machine) -> None:
    _, (start, place) = _close(machine, "REPEAT", "WHILE")
    code = machine.compiling.code
    code.append(_jump(start))
    code[place] = _jump_if_false(len(code))


def _start_loop(machine: Machine) -> None:
    limit, index = machine.pop_many(2)
    if len(machine.loops) >= machine.limits.calls:
        raise ForthError("too many loops inside one another", -7)
    machine.loops.append(Loop(index, limit))


@CONTROL.word(
    "DO",
    "limit start --",
    "Count from start up to limit - 1, at least once.",
    immediate=True,
    inside=True,
)
def _do(machine: Machine) -> None:
    machine.compiling.code.append(_start_loop)
    _open(machine, "DO", len(machine.compiling.code))


@CONTROL.word(
    "?DO", "limit start --", "Like DO, not at all when both are equal.", immediate=True, inside=True
)
def _question_do(machine: Machine) -> None:
    place = _reserve(machine)
    _open(machine, "DO", len(machine.compiling.code), place)


def _question_start(target: int) -> Op:
    def run(machine: Machine) -> None:
        limit, index = machine.pop_many(2)
        if limit == index:
            machine.position = target
        else:
            machine.push_many([limit, index])
            _start_loop(machine)

    return run


def _innermost(machine: Machine, depth: int = 0) -> Loop:
    if depth >= len(machine.loops):
        raise ForthError("there is no loop", -26)
    return machine.loops[-1 - depth]


def _advance(start: int, *, takes_step: bool) -> Op:
    def run(machine: Machine) -> None:
        loop = _innermost(machine)
        step = machine.pop() if takes_step else 1
        before = loop.index
        loop.index = signed(before + step)
        if (before < loop.limit) != (loop.index < loop.limit):
            machine.loops.pop()
        else:
            machine.position = start

    return run


def _end_loop(machine: Machine, name: str, *, takes_step: bool) -> None:
    _, (start, *leaves) = _close(machine, name, "DO")
    code = machine.compiling.code
    code.append(_advance(start, takes_step=takes_step))
    for place in leaves:
        # The first place may be the test of ?DO, which lies right before the loop.
        is_test = place == start - 1
        code[place] = _question_start(len(code)) if is_test else _jump(len(code))


@CONTROL.word("LOOP", "--", "Count on, and go back to DO.", immediate=True, inside=True)
def _loop(machine: Machine) -> None:
    _end_loop(machine, "LOOP", takes_step=False)


@CONTROL.word(
    "+LOOP",
    "n --",
    "Count on by n, and go back until the limit is crossed.",
    immediate=True,
    inside=True,
)
def _plus_loop(machine: Machine) -> None:
    _end_loop(machine, "+LOOP", takes_step=True)


@CONTROL.word("LEAVE", "--", "Leave the loop of DO at once.", immediate=True, inside=True)
def _leave(machine: Machine) -> None:
    opened = [entry for entry in machine.compiling.control if entry[0] == "DO"]
    if not opened:
        raise ForthError("LEAVE has no DO", -22)
    machine.compiling.code.append(_unloop)
    opened[-1][1].append(_reserve(machine))


@CONTROL.word("UNLOOP", "--", "Forget a counted loop before EXIT.", inside=True)
def _unloop(machine: Machine) -> None:
    _innermost(machine)
    machine.loops.pop()


for _name, _depth, _text in (
    ("I", 0, "The count of the innermost loop."),
    ("J", 1, "The count of the loop around it."),
    ("K", 2, "The count of the loop around J's."),
):

    def _count(machine: Machine, depth: int = _depth) -> None:
        machine.push(_innermost(machine, depth).index)

    CONTROL.word(_name, "-- n", _text, inside=True)(_count)


def _exit_now(machine: Machine) -> None:
    machine.position = len(machine.running)


CONTROL.word("EXIT", "--", "Return from the definition.", inside=True)(_exit_now)


@CONTROL.word("CASE", "x -- x", "Begin a choice between values.", immediate=True, inside=True)
def _case(machine: Machine) -> None:
    _open(machine, "CASE")


@CONTROL.word("OF", "x n --", "Go on when x is n, else after ENDOF.", immediate=True, inside=True)
def _of(machine: Machine) -> None:
    _, ends = _close(machine, "OF", "CASE")
    _open(machine, "CASE", *ends)
    _open(machine, "OF", _reserve(machine))


def _of_test(target: int) -> Op:
    def run(machine: Machine) -> None:
        value, wanted = machine.pop_many(2)
        if value != wanted:
            machine.push(value)
            machine.position = target

    return run


@CONTROL.word("ENDOF", "--", "The end of what OF began.", immediate=True, inside=True)
def _endof(machine: Machine) -> None:
    _, (place,) = _close(machine, "ENDOF", "OF")
    end = _reserve(machine)
    machine.compiling.code[place] = _of_test(len(machine.compiling.code))
    machine.compiling.control[-1][1].append(end)


@CONTROL.word(
    "ENDCASE", "x --", "The end of CASE; drops x where no OF took it.", immediate=True, inside=True
)
def _endcase(machine: Machine) -> None:
    _, ends = _close(machine, "ENDCASE", "CASE")
    code = machine.compiling.code
    code.append(lambda m: m.pop_many(1).clear())
    for place in ends:
        code[place] = _jump(len(code))


@CONTROL.word(
    "RECURSE", "--", "Call the definition that is being compiled.", immediate=True, inside=True
)
def _recurse(machine: Machine) -> None:
    code = machine.compiling.code
    code.append(lambda m: m.call(code))


@CONTROL.word("EXECUTE", "xt --", "Run the word of an execution token.")
def _execute(machine: Machine) -> None:
    machine.enter(machine.word_of(machine.pop()))


@CONTROL.word("CATCH", "xt -- 0 | n", "Run a word; the number of its error, or 0.")
def _catch(machine: Machine) -> None:
    machine.push(machine.guarded(machine.word_of(machine.pop())))


@CONTROL.word("THROW", "n --", "Fail with a number, unless it is 0.")
def _throw(machine: Machine) -> None:
    code = machine.pop()
    if code:
        raise ForthError(f"error {code} was thrown", code)


@CONTROL.word("ABORT", "--", "End the program.")
def _abort(machine: Machine) -> None:  # noqa: ARG001
    raise ForthError("the program aborted", _ABORTED)


@CONTROL.word(
    'ABORT"',
    "flag --",
    'End the program with a text, up to ", when the flag is not 0.',
    immediate=True,
)
def _abort_with(machine: Machine) -> None:
    text = machine.parse('"')

    def run(inner: Machine) -> None:
        if inner.pop():
            raise ForthError(text, _ABORTED)

    _do_or_compile(machine, run)


@CONTROL.word("ASSERT", "flag --", "Fail when the flag is 0.")
def _assert(machine: Machine) -> None:
    if not machine.pop():
        raise ForthError("an assertion failed", -2)


def _do_or_compile(machine: Machine, run: Op) -> None:
    if machine.definition is None:
        run(machine)
    else:
        machine.definition.code.append(run)


# -- new words


@DEFINING.word(":", "--", "Begin a definition; its name follows.")
def _colon(machine: Machine) -> None:
    if machine.definition is not None:
        raise ForthError("a definition inside a definition", -29)
    machine.definition = Definition(Word(machine.new_name(), "", ""))


@DEFINING.word(":NONAME", "-- xt", "Begin a definition without a name; ; leaves its token.")
def _noname(machine: Machine) -> None:
    machine.definition = Definition(Word("", "", ""))


@DEFINING.word(";", "--", "End a definition.", immediate=True, inside=True)
def _semicolon(machine: Machine) -> None:
    definition = machine.compiling
    if definition.control:
        raise ForthError(f"{definition.control[-1][0]} is not ended", -22)
    definition.word.code = definition.code
    machine.definition, machine.latest = None, definition.word
    machine.add(definition.word)
    if not definition.word.name:
        machine.push(len(machine.words) - 1)


@DEFINING.word("IMMEDIATE", "--", "The last definition runs while others are compiled.")
def _immediate(machine: Machine) -> None:
    if machine.latest is None:
        raise ForthError("there is no definition yet", -22)
    machine.latest.is_immediate = True


def _create(machine: Machine, body: int | None, run: Op | None = None) -> Word:
    word = Word(machine.new_name(), "", "", run, body=body)
    machine.add(word)
    machine.latest = word
    return word


@DEFINING.word("CREATE", "--", "Name the next free address; the word pushes it.")
def _create_word(machine: Machine) -> None:
    _create(machine, machine.here)


@DEFINING.word("VARIABLE", "--", "Name a new cell that holds 0; the word pushes its address.")
def _variable(machine: Machine) -> None:
    address = machine.allot(CELL)
    machine.store(address, 0)
    _create(machine, address)


@DEFINING.word("2VARIABLE", "--", "Name two new cells that hold 0.")
def _two_variable(machine: Machine) -> None:
    address = machine.allot(2 * CELL)
    machine.memory[machine.span(address, 2 * CELL)] = bytes(2 * CELL)
    _create(machine, address)


DEFINING.add("FVARIABLE", "--", "Name a new cell for a float.", _variable)


@DEFINING.word("BUFFER:", "n --", "Name n new bytes.")
def _buffer(machine: Machine) -> None:
    _create(machine, machine.allot(machine.pop()))


@DEFINING.word(
    "ARRAY", "n --", "Name n cells that hold 0; the word turns an index into an address."
)
def _array(machine: Machine) -> None:
    count = machine.pop()
    if count < 0:
        raise ForthError("a negative count", -24)
    start = machine.allot(count * CELL)
    machine.memory[machine.span(start, count * CELL)] = bytes(count * CELL)

    def run(inner: Machine) -> None:
        place = inner.pop()
        if not 0 <= place < count:
            raise ForthError(f"index {place} of an array of {count}", -24)
        inner.push(start + place * CELL)

    _create(machine, None, run)


@DEFINING.word("CONSTANT", "x --", "Name a number; the word pushes it.")
def _constant(machine: Machine) -> None:
    _create(machine, machine.pop())


@DEFINING.word("2CONSTANT", "a b --", "Name a pair of numbers.")
def _two_constant(machine: Machine) -> None:
    values = machine.pop_many(2)
    _create(machine, None, lambda m: m.push_many(values))


@DEFINING.word("FCONSTANT", "F: x --", "Name a float.")
def _float_constant(machine: Machine) -> None:
    value = machine.pop_float()
    _create(machine, None, lambda m: m.push_float(value))


@DEFINING.word("VALUE", "x --", "Name a number that TO can change.")
def _value(machine: Machine) -> None:
    value = machine.pop()
    _create(machine, value).text = "value"


def _named_value(machine: Machine) -> Word:
    word = machine.words[machine.find(machine.parse_name())]
    if word.text != "value" or word.group != "yours":
        raise ForthError(f"{word.name} was not made by VALUE", -32)
    return word


@DEFINING.word("TO", "x --", "Change what VALUE named; its name follows.", immediate=True)
def _to(machine: Machine) -> None:
    word = _named_value(machine)

    def run(inner: Machine) -> None:
        word.body = inner.pop()

    _do_or_compile(machine, run)


@DEFINING.word("+TO", "n --", "Add to what VALUE named; its name follows.", immediate=True)
def _plus_to(machine: Machine) -> None:
    word = _named_value(machine)

    def run(inner: Machine) -> None:
        word.body = signed((word.body or 0) + inner.pop())

    _do_or_compile(machine, run)


def _undecided(machine: Machine) -> None:  # noqa: ARG001
    raise ForthError("a deferred word has no action yet", -261)


@DEFINING.word("DEFER", "--", "Name a word whose action IS sets later.")
def _defer(machine: Machine) -> None:
    _create(machine, None).code = [_undecided]


@DEFINING.word(
    "IS", "xt --", "Set the action of a deferred word; its name follows.", immediate=True
)
def _is(machine: Machine) -> None:
    deferred = machine.words[machine.find(machine.parse_name())]
    if deferred.group != "yours" or deferred.code is None:
        raise ForthError(f"{deferred.name} was not made by DEFER", -32)

    def run(inner: Machine) -> None:
        action = inner.word_of(inner.pop())
        deferred.code = [lambda m: m.enter(action)]

    _do_or_compile(machine, run)


@DEFINING.word("DOES>", "--", "What a word made by CREATE does with its address.", inside=True)
def _does(machine: Machine) -> None:
    if machine.latest is None or machine.latest.body is None:
        raise ForthError("DOES> must come after CREATE", -31)
    machine.latest.code, machine.latest.start = machine.running, machine.position
    _exit_now(machine)


DEFINING.add(
    "'",
    "-- xt",
    "The token of the word whose name follows.",
    lambda m: m.push(m.find(m.parse_name())),
)


@DEFINING.word(
    "[']", "-- xt", "Compile the token of the word whose name follows.", immediate=True, inside=True
)
def _bracket_tick(machine: Machine) -> None:
    machine.literal(machine.find(machine.parse_name()))


@DEFINING.word("LITERAL", "x --", "Compile a number.", immediate=True, inside=True)
def _literal(machine: Machine) -> None:
    machine.literal(machine.pop())


@DEFINING.word(
    "POSTPONE",
    "--",
    "Compile the word whose name follows, also when it is immediate.",
    immediate=True,
    inside=True,
)
def _postpone(machine: Machine) -> None:
    word = machine.words[machine.find(machine.parse_name())]
    if word.is_immediate:
        machine.compile(word)
    else:
        machine.compiling.code.append(lambda m: m.compile(word))


@DEFINING.word("CHAR", "-- char", "The first character of the text that follows.")
def _char(machine: Machine) -> None:
    machine.push(ord((machine.parse_name() or "\0")[0]) & 255)


@DEFINING.word(
    "[CHAR]",
    "-- char",
    "Compile the first character of the text that follows.",
    immediate=True,
    inside=True,
)
def _bracket_char(machine: Machine) -> None:
    machine.literal(ord((machine.parse_name() or "\0")[0]) & 255)


@DEFINING.word("(", "--", "A comment up to the bracket.", immediate=True)
def _comment(machine: Machine) -> None:
    machine.parse(")")


@DEFINING.word("\\", "--", "A comment up to the end of the line.", immediate=True)
def _line_comment(machine: Machine) -> None:
    machine.parse("\n")


def _say(text: str) -> Op:
    return lambda machine: machine.emit(text)


@DEFINING.word('."', "--", 'Print the text up to ".', immediate=True)
def _print_text(machine: Machine) -> None:
    _do_or_compile(machine, _say(machine.parse('"')))


@DEFINING.word(".(", "--", "Print the text up to the bracket at once.", immediate=True)
def _print_now(machine: Machine) -> None:
    machine.emit(machine.parse(")"))


@DEFINING.word('S"', "-- addr n", 'The text up to " as a string.', immediate=True)
def _string(machine: Machine) -> None:
    address, count = machine.keep_text(machine.parse('"'))
    machine.literal(address)
    machine.literal(count)


@DEFINING.word("EVALUATE", "addr n --", "Interpret a string as a program.")
def _evaluate(machine: Machine) -> None:
    machine.evaluate(pop_text(machine))


@DEFINING.word("DEFINED?", "-- flag", "Whether the name that follows is a word.")
def _is_defined(machine: Machine) -> None:
    machine.push_flag(machine.parse_name().upper() in machine.names)
