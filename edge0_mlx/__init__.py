"""edge0 on MLX: the production backend for Apple silicon, which also runs, slowly, on Linux CPUs.

A file named like one of `edge0_ref` is its twin: the same public names in the same order, as MLX operations. Comments
are where MLX forces a difference. Others have no twin: they hold what MLX needs and NumPy does not. `device`, `memory`
and `arrays` are about where it runs and what it holds; `slots` about memory that a reader may write; `blocks`,
`layers`, `heads` and `stretches` about the graph of a token, in as few compiled functions as the host allows.
"""

import os
from importlib.metadata import version
from importlib.util import find_spec

from edge0_ref.errors import BackendError

OLDEST_MLX = (0, 32)


def keep_float32() -> None:
    """[NUM-011] Products of float32 are of float32: on GPUs with matrix units MLX rounds their operands to TF32.

    On an M5, say: its users report products of a prompt's rows that are off by 8e-4 (ml-explore/mlx#3860, #3534).
    MLX asks the environment before its first product on a GPU, and never again.
    """
    os.putenv("MLX_ENABLE_TF32", "0")


def check_mlx() -> None:
    """[BCK-008] Raises BackendError naming the extra to install when MLX is missing or older than OLDEST_MLX."""
    wanted = f"MLX {'.'.join(map(str, OLDEST_MLX))} or newer: pip install 'edge0[mlx]'"
    if find_spec("mlx") is None:
        raise BackendError(f"the mlx backend needs {wanted}")
    found = version("mlx")
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST_MLX:
        raise BackendError(f"MLX {found} is installed; the mlx backend needs {wanted}")


keep_float32()
check_mlx()
