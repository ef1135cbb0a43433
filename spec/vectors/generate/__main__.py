"""Writes the vector files to a folder: `python spec/vectors/generate FOLDER` (needs numpy and mlx; no edge0)."""

import json
import sys
from pathlib import Path

import adapter_cases
import decoder_cases
import dequant_cases
import expert_cases
import header_cases
import linear_cases
import number_cases
import prerouter_cases
import quantize_cases
import residency_cases
import router_cases
import sampling_cases

CHAPTERS = {
    "numbers": number_cases,
    "dequant": dequant_cases,
    "quantize": quantize_cases,
    "linear": linear_cases,
    "router": router_cases,
    "experts": expert_cases,
    "headers": header_cases,
    "residency": residency_cases,
    "prerouter": prerouter_cases,
    "adapters": adapter_cases,
    "decoder": decoder_cases,
    "sampling": sampling_cases,
}


def text(chapter: str, cases: list[dict[str, object]], shared: dict[str, object]) -> str:
    """One case a line: long, but a change shows as the case it is in."""
    head: dict[str, object] = {"chapter": chapter, "version": 1, **({"shared": shared} if shared else {})}
    lines = ",\n".join(f"    {json.dumps(case)}" for case in cases)
    return f'{json.dumps(head, indent=None)[:-1]}, "cases": [\n{lines}\n]}}\n'


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for chapter, module in CHAPTERS.items():
        cases = module.cases()
        (folder / f"{chapter}.json").write_text(text(chapter, cases, getattr(module, "SHARED", {})), "utf-8")
        count += len(cases)
    print(f"{count} cases in {len(CHAPTERS)} files")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
