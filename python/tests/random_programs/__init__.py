"""Random programs around what autograd saves, each run with plain autograd and with ebb, and compared bit for bit.

program.py      a program: lines and blocks, which become Python source
operations.py   what a line may be
generator.py    draws programs
running.py      what a program's source calls: foreign hooks, guards, notes of what is to be compared
setting.py      the offloaders
check.py        runs one program in all ways and compares
shrinker.py     makes a wrong program small
__main__.py     many programs, in child processes
"""
