import random
from pathlib import Path

import pytest

from conftest import run_python
from random_programs.generator import generate
from random_programs.operations import OPERATIONS, REGIONS
from random_programs.program import Block, Line, copied, size, statements, to_text
from random_programs.shrinker import shrink


def test_random_programs_have_the_bits_errors_and_calls_of_plain_autograd():
    out = run_python(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from random_programs.__main__ import main
        sys.argv[1:] = ["--programs", "150", "--seed", "1"]
        status = main()
        assert status == 0, status
        """,
        timeout=600,
    )
    assert out.splitlines()[-1].startswith("programs: 150, seed: 1, moved: ")


def test_a_program_is_its_number_and_seed():
    assert to_text(generate(3, 1)) == to_text(generate(3, 1)) != to_text(generate(3, 2))


def test_programs_have_every_operation_and_kind_of_region():
    every = [each for number in range(1000) for each in statements(generate(number, 1).forward)]
    lines = {each.text for each in every if isinstance(each, Line)}
    regions = {each.header for each in every if isinstance(each, Block) and each.is_region}
    assert {each.text for each in OPERATIONS} <= lines
    assert set(REGIONS) == regions


@pytest.mark.parametrize("number", range(40))
def test_what_a_shrinker_tries_is_python_and_keeps_what_fails(number):
    program = generate(number, 1)
    wanted = random.Random(number).choice([each.text for each in statements(program.forward) if isinstance(each, Line)])
    before = size(program)

    def fails(smaller):
        compile(to_text(smaller), "<smaller>", "exec")
        return any(isinstance(each, Line) and each.text == wanted for each in statements(smaller.forward))

    small = shrink(copied(program), fails, most_runs=4000)
    assert size(small) <= min(before, 2)
    assert fails(small)
