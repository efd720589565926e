"""Makes a wrong program small: leaves out what it can, while the program stays wrong."""

from collections.abc import Callable, Iterator

from random_programs.operations import BACKWARDS
from random_programs.program import Block, Line, Program, Statement, copied, rename, statements


def _bodies(program: Program) -> list[list[Statement]]:
    return [program.forward, *(each.body for each in statements(program.forward) if isinstance(each, Block))]


def _leave_out(program: Program, body: list[Statement], place: int) -> None:
    """Without the statement; what it made is then its first operand."""
    gone = body[place]
    if isinstance(gone, Line):
        if gone.result is not None:
            rename(program, gone.result, gone.operands[0])
    elif gone.is_region:
        for number, result in enumerate(gone.results):
            rename(program, result, gone.operands[min(number, len(gone.operands) - 1)])
    else:
        while gone.body:
            _leave_out(program, gone.body, 0)
    del body[place]


def _unwrap(program: Program, body: list[Statement], place: int) -> None:
    """Has a block's body in the block's place."""
    gone = body[place]
    body[place : place + 1] = gone.body
    if gone.is_region:
        for parameter, operand in zip(gone.parameters, gone.operands, strict=True):
            rename(program, parameter, operand)
        inside = dict(zip(gone.parameters, gone.operands, strict=True))
        for result, returned in zip(gone.results, gone.returned, strict=True):
            rename(program, result, inside.get(returned, returned))


def _smaller(program: Program) -> Iterator[Callable[[Program], None]]:
    """Changes, each of which makes the program smaller or plainer. The last statements first: they need the others."""
    bodies = _bodies(program)
    for which in range(len(bodies)):
        for place in reversed(range(len(bodies[which]))):
            yield lambda p, w=which, n=place: _leave_out(p, _bodies(p)[w], n)
    for which in range(len(bodies)):
        for place, each in enumerate(bodies[which]):
            if isinstance(each, Block):
                yield lambda p, w=which, n=place: _unwrap(p, _bodies(p)[w], n)
                if len(each.returned) > 1:
                    yield lambda p, w=which, n=place: _one_result(p, _bodies(p)[w][n])
                if len(each.operands) > 1:
                    yield lambda p, w=which, n=place: _one_operand(p, _bodies(p)[w][n])
                if each.is_region and each.header != "checkpoint({0}, use_reentrant=False)":
                    yield lambda p, w=which, n=place: _plainer_region(_bodies(p)[w][n])
            elif each.held:
                yield lambda p, w=which, n=place: setattr(_bodies(p)[w][n], "held", False)
    if program.kept:
        yield lambda p: p.kept.clear()
    if program.losses[0] != program.losses[1]:
        yield lambda p: p.losses.__setitem__(1, p.losses[0])
    if program.backward != BACKWARDS[0]:
        yield lambda p: p.backward.__setitem__(slice(None), BACKWARDS[0])
    if program.updates:
        yield lambda p: setattr(p, "updates", False)
    if program.steps > 1:
        yield lambda p: setattr(p, "steps", 1)
        yield lambda p: setattr(p, "steps", p.steps - 1)


def _one_result(program: Program, block: Block) -> None:
    rename(program, block.results.pop(), block.results[0])
    block.returned.pop()


def _one_operand(program: Program, block: Block) -> None:
    block.operands.pop()
    rename(program, block.parameters.pop(), block.parameters[0])


def _plainer_region(block: Block) -> None:
    block.header = "checkpoint({0}, use_reentrant=False)"


def shrink(program: Program, fails: Callable[[Program], bool], most_runs: int = 400) -> Program:
    """The smallest program found for which `fails` is true, as it is for the program given."""
    runs = 0
    changed = True
    while changed:
        changed = False
        number = 0
        while True:
            changes = list(_smaller(program))
            if number >= len(changes):
                break
            runs += 1
            if runs > most_runs:
                return program
            smaller = copied(program)
            changes[number](smaller)
            if fails(smaller):
                program = smaller
                changed = True
            else:
                number += 1
    return program
