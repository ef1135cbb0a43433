"""`python -m tests.mlx.peaks FOLDER`: the most memory that decoding with a model took, as a JSON line.

A process of its own, because a peak is one of the whole process, of everything it ever did.
"""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx

from edge0_mlx.backend import create
from edge0_ref.contract import Plan
from edge0_ref.engine.memory import peak_bytes
from edge0_ref.inventory import open_checkpoint

ROOT = Path(__file__).parents[2]
STEPS = 12


def peaks_of(folder: Path) -> dict[str, int]:
    """mlx: bytes of MLX's allocator; process: of the whole process."""
    command = [sys.executable, "-m", "tests.mlx.peaks", str(folder)]
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    peaks: dict[str, int] = json.loads(shown.splitlines()[-1])
    return peaks


def main(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    top_k = checkpoint.config.top_k
    decoder = create().decoder(checkpoint, Plan(top_k=top_k, slots=2 * top_k))
    decoder.prefill([5, 6, 7])
    for token in range(STEPS):
        decoder.step(token)
    decoder.close()
    print(json.dumps({"mlx": mx.get_peak_memory(), "process": peak_bytes()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
