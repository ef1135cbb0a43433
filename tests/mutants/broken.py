"""`python -m tests.mutants.broken MUTANT MODULE [ARGUMENT...]`: a command of edge0's, broken by a mutant."""

import sys
from importlib import import_module
from inspect import signature

from tests.mutants import MUTANTS, broken


def main() -> int:
    name, module, *arguments = sys.argv[1:]
    command = import_module(module).main
    sys.argv = [module, *arguments]
    with broken(next(mutant for mutant in MUTANTS if mutant.__name__ == name)):
        return int(command(arguments) if signature(command).parameters else command() or 0)


if __name__ == "__main__":
    sys.exit(main())
