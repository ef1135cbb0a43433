"""`python -m tests.mutants [NAME...]`: the kill table, `--json` for programs; exit code 1 if a mutant lives."""

import gc
import json
import os
import sys
from dataclasses import asdict

from tests.mutants import MUTANTS, import_everything, try_to_kill


def main(arguments: list[str]) -> int:
    os.environ.pop("PYTEST_ADDOPTS", None)
    as_json, names = "--json" in arguments, [argument for argument in arguments if argument != "--json"]
    unknown = sorted(set(names) - {mutant.__name__ for mutant in MUTANTS})
    if unknown:
        print(f"no mutant {', '.join(unknown)}", file=sys.stderr)
        return 2
    import_everything()
    gc.freeze()  # pytest collects garbage after each run, which must not mean looking through every module
    living = []
    for mutant in [mutant for mutant in MUTANTS if not names or mutant.__name__ in names]:
        verdict = try_to_kill(mutant)
        living += [] if verdict.killed else [verdict.name]
        if as_json:
            print(json.dumps(asdict(verdict)), flush=True)
        else:
            fate = "killed" if verdict.killed else "LIVES"
            print(f"{verdict.requirement}  {fate:6} by {verdict.by:11}  {verdict.seconds:4.1f} s  {verdict.name}")
            print(f"{'':9}{verdict.message[:150]}")
    if not as_json:
        print(f"{len(names) or len(MUTANTS)} mutants, alive: {', '.join(living) or 'none'}")
    return 1 if living else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
