"""`python -m conformance --backend NAME`: exit code 0 all claimed pass, 1 failures, 2 usage."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from conformance.requirements import read_requirements
from conformance.runner import EXAMPLES, load_backend, run
from edge0_ref.errors import BackendError


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m conformance", description="Hold a backend to edge0's specification.")
    parser.add_argument("--backend", required=True, help="a name from edge0.backends, or package.module:factory")
    parser.add_argument("--only", default="", metavar="ID[,ID]", help="these requirements only")
    parser.add_argument("--seed", type=int, help="draw other examples than the standing ones")
    parser.add_argument("--profile", choices=("ci", "deep"), default="ci", help=f"examples a test: {EXAMPLES}")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the result as JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse_arguments(arguments)
    only = [id_ for id_ in options.only.split(",") if id_]
    unknown = [id_ for id_ in only if id_ not in read_requirements()]
    if unknown:
        print(f"--only {','.join(unknown)}: spec/ has no such requirement", file=sys.stderr)
        return 2
    if options.report and not options.report.resolve().parent.is_dir():
        print(f"--report {options.report}: no such folder", file=sys.stderr)
        return 2
    try:
        backend = load_backend(options.backend)
        report = run(backend, only, options.profile, options.seed, label=options.backend, quiet=False)
    except BackendError as error:
        print(error, file=sys.stderr)
        return 2
    for test, message in report.recorder.failures:
        print(f"\n{test}\n{message}")
    print(f"\n{report.table()}")
    if options.report:
        options.report.write_text(json.dumps(report.to_json(), indent=2) + "\n", "utf-8")
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
