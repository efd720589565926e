"""A program: lines and blocks, which become Python source.

All values are tensors of SIZE x SIZE elements, and each name is assigned once, so that any line may be left out: its
first operand then stands for its result.
"""

import copy
import dataclasses
from collections.abc import Iterator

SIZE = 8
LEAVES = ("a", "b", "c")  # require gradients
DATA = ("x",)
INDENT = "    "


@dataclasses.dataclass(eq=False)
class Line:
    """`result = text`, with operands in the places {0}, {1}; without a result, a statement."""

    text: str
    operands: list[str]
    result: str | None = None
    held: bool = False  # by the program until forward ends, and not only until the last use
    writes: bool = False


@dataclasses.dataclass(eq=False)
class Block:
    """A `with` statement; or, with `parameters`, a function of its own that `header`, with {0} for it, calls."""

    header: str
    body: list["Statement"]
    name: str | None = None  # of what is counted
    operands: list[str] = dataclasses.field(default_factory=list)
    parameters: list[str] | None = None
    returned: list[str] = dataclasses.field(default_factory=list)
    results: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_region(self) -> bool:
        return self.parameters is not None

    @property
    def is_ebbs(self) -> bool:
        return self.header.startswith("run.checkpoint(")


Statement = Line | Block


@dataclasses.dataclass
class Program:
    forward: list[Statement]
    losses: list[str]  # two values, of which losses are made
    kept: list[str]  # what the program holds during backward
    backward: list[str]
    updates: bool = False  # weights after each step, as an optimizer does
    steps: int = 4


def statements(body: list[Statement]) -> Iterator[Statement]:
    for each in body:
        yield each
        if isinstance(each, Block):
            yield from statements(each.body)


def rename(program: Program, old: str, new: str) -> None:
    def renamed(names: list[str]) -> list[str]:
        return [new if each == old else each for each in names]

    for each in statements(program.forward):
        each.operands = renamed(each.operands)
        if isinstance(each, Block):
            each.returned = renamed(each.returned)
    program.losses = renamed(program.losses)
    program.kept = renamed(program.kept)


def writes(program: Program) -> bool:
    return any(isinstance(each, Line) and each.writes for each in statements(program.forward))


def has_foreign_hooks(program: Program) -> bool:
    blocks = [each for each in statements(program.forward) if isinstance(each, Block) and not each.is_region]
    return any(each.name is not None or each.header == "save_on_cpu()" for each in blocks)


def uncounted(program: Program) -> set[str]:
    """What runs otherwise often with ebb by right: what is in a region of ebb's own, and what has one in it."""
    names: set[str] = set()

    def visit(body: list[Statement], inside: bool) -> bool:
        found = False
        for each in body:
            if isinstance(each, Line):
                if inside and each.result is None:
                    names.add(each.text.split('"')[1])
                continue
            has = visit(each.body, inside or each.is_ebbs) or each.is_ebbs
            if each.name is not None and (inside or has):
                names.add(each.name)
            found = found or has
        return found

    if visit(program.forward, False):
        names.add("contexts")  # of whichever region
    return names


def _last_uses(body: list[Statement], scope: dict[int, list[str]], local: set[str]) -> None:
    """Notes after which line of a function each of its names may be deleted, by the line's identity."""
    last: dict[str, int] = {}
    captured: set[str] = set()

    def visit(body: list[Statement]) -> None:
        for each in body:
            if isinstance(each, Block) and not each.is_region:
                visit(each.body)
                continue
            for name in each.operands:
                last[name] = id(each)
            if isinstance(each, Block):
                own = set(each.parameters)
                for inner in statements(each.body):
                    captured.update(inner.operands)
                    if isinstance(inner, Block):
                        captured.update(inner.returned)
                captured.update(set(each.returned) - own)
                local.update(each.results)
            elif each.result is not None and not each.held:
                local.add(each.result)

    visit(body)
    for name, line in last.items():
        if name in local and name not in captured:
            scope.setdefault(line, []).append(name)


def _text(body: list[Statement], indent: str, after: dict[int, list[str]], needed: set[str]) -> list[str]:
    lines: list[str] = []
    for each in body:
        if isinstance(each, Line):
            text = each.text.format(*each.operands)
            lines.append(f"{indent}{each.result} = {text}" if each.result else f"{indent}{text}")
        elif each.is_region:
            lines.append(f"{indent}def {each.name}({', '.join(each.parameters)}):")
            lines.append(f'{indent}{INDENT}run.count("{each.name}")')
            lines += _function(each.body, indent + INDENT, each.returned, set(each.parameters))
            lines.append(f"{indent}{INDENT}return {', '.join(each.returned)}")
            call = each.header.format(", ".join([each.name, *each.operands]))
            lines.append(f"{indent}{', '.join(each.results)} = {call}")
        else:
            lines.append(f"{indent}with {each.header}:")
            lines += _text(each.body, indent + INDENT, after, needed) or [f"{indent}{INDENT}pass"]
        gone = [name for name in after.get(id(each), []) if name not in needed]
        if gone:
            lines.append(f"{indent}del {', '.join(gone)}")
    return lines


def _function(body: list[Statement], indent: str, returned: list[str], parameters: set[str]) -> list[str]:
    after: dict[int, list[str]] = {}
    _last_uses(body, after, set(parameters))
    return _text(body, indent, after, set(returned))


def to_text(program: Program) -> str:
    """Python source with two functions: forward(run, ...), and step(run), which runs it and goes backward."""
    lines = [f"def forward(run, {', '.join((*LEAVES, *DATA))}):"]
    needed = [*program.losses, *program.kept]
    lines += _function(program.forward, INDENT, needed, set())
    lines.append(
        f"    return run.loss({program.losses[0]}), run.loss({program.losses[1]}), [{', '.join(program.kept)}]"
    )
    lines += ["", "def step(run):", f"    {', '.join((*LEAVES, *DATA))} = run.leaves", "    with run.guard():"]
    lines.append(f"        loss, other, kept = forward(run, {', '.join((*LEAVES, *DATA))})")
    lines.append('    run.note("forward", loss, other)')
    lines += [INDENT + each for each in program.backward]
    return "\n".join(lines) + "\n"


def size(program: Program) -> int:
    return sum(1 for _ in statements(program.forward)) + len(program.backward)


def copied(program: Program) -> Program:
    return copy.deepcopy(program)
