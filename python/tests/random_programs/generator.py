"""Draws programs. The same numbers give the same program."""

import random

from random_programs import operations
from random_programs.program import DATA, LEAVES, Block, Line, Program, Statement, statements


class _Generator:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._names = 0
        self._lines_left = 0
        # Not every program has everything: what ends a program hides what comes after it.
        self._has_writes = rng.random() < 0.2
        self._has_errors = rng.random() < 0.15
        self._has_foreign_hooks = rng.random() < 0.6
        self._has_modes = rng.random() < 0.5
        self._has_ebbs_regions = rng.random() < 0.3
        self._in_ebbs_region = False
        self._in_torchs_region = False
        self._may_have_ebbs_region = (
            True  # not inside of hooks that lose bits or count to a refusal: it has other saves
        )

    def program(self) -> Program:
        rng = self._rng
        self._lines_left = rng.choice([4, 8, 12, 16, 24])
        names = [*LEAVES, *DATA]
        forward = self._body(names, depth=0, captures=True)
        backwards = operations.BACKWARDS
        blocks = [each for each in statements(forward) if isinstance(each, Block)]
        if rng.random() < 0.9 and any("use_reentrant=True" in each.header for each in blocks):
            backwards = [
                each for each in backwards if "torch.autograd.grad(" not in " ".join(each)
            ]  # which raises there
        made = names[len(LEAVES) + len(DATA) :] or names
        return Program(
            forward,
            losses=[made[-1], rng.choice(made)],
            kept=rng.sample(made, min(len(made), rng.choice([0, 0, 1, 2]))),
            backward=list(rng.choice(backwards)),
            updates=rng.random() < 0.5,
            steps=rng.choice([2, 4, 4, 5]),
        )

    def _new(self, kind: str) -> str:
        self._names += 1
        return f"{kind}{self._names}"

    def _pick(self, names: list[str]) -> str:
        """Mostly one of the newest: programs are deep rather than wide."""
        return self._rng.choice(names[-3:] if self._rng.random() < 0.7 else names)

    def _body(self, names: list[str], depth: int, captures: bool) -> list[Statement]:
        """Adds to `names` what the body makes."""
        body: list[Statement] = []
        length = self._rng.randint(1, 4) if depth else 1000
        while self._lines_left > 0 and len(body) < length:
            if depth < 3 and self._rng.random() < 0.3:
                make = self._region if self._rng.random() < 0.6 else self._with
                body.append(make(names, depth, captures))
            else:
                self._lines_left -= 1
                body.append(self._line(names, depth))
        return body

    def _line(self, names: list[str], depth: int) -> Line:
        rng = self._rng
        chance = rng.random()
        if self._has_errors and depth and chance < 0.08:
            at = 1 if self._in_ebbs_region else rng.randint(1, 3)
            return Line(rng.choice(operations.ERRORS).format(self._new("r"), at), [])
        if chance < 0.04 and not self._in_ebbs_region:  # a second run would add the hook to what it captures once more
            # In torch's region a leaf's hook that runs backward was seen to start others without end, without ebb, too.
            hooks = operations.HOOKS[:1] if self._in_torchs_region else operations.HOOKS
            return Line(rng.choice(hooks).format(self._new("g")), [self._pick(names)])
        operation = rng.choice(operations.OPERATIONS)
        while self._in_ebbs_region and "norm({0})" in operation.text and "run." in operation.text:
            operation = rng.choice(operations.OPERATIONS)  # a second run counts, where there is one
        while self._in_torchs_region and "rrelu" in operation.text:
            operation = rng.choice(operations.OPERATIONS)  # saves what it has yet to fill, and torch stops there
        made = [name for name in names if name[0] in "vp"]
        # A region of ebb's own must leave its inputs, and what it captures, as they are.
        if self._has_writes and made and not self._in_ebbs_region and rng.random() < 0.2:
            operation = rng.choice(operations.IN_PLACE)
            operands = [self._pick(made), *(self._pick(names) for _ in range(operation.operands - 1))]
        else:
            operands = [self._pick(names) for _ in range(operation.operands)]
        result = self._new("v")
        names.append(result)
        return Line(operation.text, operands, result, held=rng.random() < 0.3, writes=operation.writes)

    def _with(self, names: list[str], depth: int, captures: bool) -> Block:
        rng = self._rng
        choices = [operations.GUARDS]
        if self._has_foreign_hooks:
            choices += [operations.FOREIGN_HOOKS] * 3
        if self._has_modes:
            choices.append(operations.MODES)
        header = rng.choice(rng.choice(choices))
        while ("refusing" in header or "stopping" in header) and (self._in_ebbs_region or not self._has_errors):
            header = rng.choice(operations.FOREIGN_HOOKS)
        name = self._new("h") if "{0}" in header else None
        before = self._may_have_ebbs_region
        self._may_have_ebbs_region &= not any(each in header for each in ("rounding", "refusing", "stopping"))
        body = self._body(names, depth + 1, captures)
        self._may_have_ebbs_region = before
        return Block(header.format(name, rng.randint(1, 4)), body, name)

    def _region(self, names: list[str], depth: int, captures: bool) -> Block:
        rng = self._rng
        ebbs = self._has_ebbs_regions and self._may_have_ebbs_region
        headers = [each for each in operations.REGIONS if ebbs or "run.checkpoint" not in each]
        header = rng.choice(headers)
        # What a reentrant region captures has its graph gone over twice.
        captures = captures and "use_reentrant=True" not in header and rng.random() < 0.4
        operands = [self._pick(names) for _ in range(rng.choice([1, 1, 2]))]
        operands = list(dict.fromkeys(operands)) if rng.random() < 0.8 else operands
        parameters = [self._new("p") for _ in operands]
        inside = [*(names if captures else LEAVES), *parameters]
        known = len(inside)
        before = self._in_ebbs_region, self._in_torchs_region
        self._in_ebbs_region |= "run.checkpoint" in header
        self._in_torchs_region |= "use_reentrant=False" in header
        body = self._body(inside, depth + 1, captures)
        self._in_ebbs_region, self._in_torchs_region = before
        made = inside[known:] or parameters
        returned = [made[-1]]
        if len(made) > 1 and rng.random() < 0.3:
            returned.append(rng.choice(made[:-1]))
        results = [self._new("v") for _ in returned]
        names.extend(results)
        return Block(header, body, self._new("f"), operands, parameters, returned, results)


def generate(number: int, seed: int) -> Program:
    return _Generator(random.Random(f"program {seed} {number}")).program()
