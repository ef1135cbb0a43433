"""edge0 on MLX: the production backend for Apple silicon, which also runs, slowly, on Linux CPUs.

A file named like one of `edge0_ref` is its twin: the same public names in the same order, as MLX operations. Comments
are where MLX forces a difference. Others have no twin: they hold what MLX needs and NumPy does not. `device`, `memory`
and `arrays` are about where it runs and what it holds; `slots` about memory that a reader may write; `blocks`,
`layers`, `heads` and `stretches` about the graph of a token, in as few compiled functions as the host allows.
"""

from importlib.metadata import version
from importlib.util import find_spec

from edge0_ref.errors import BackendError

OLDEST_MLX = (0, 32)


def check_mlx() -> None:
    """[BCK-008] Raises BackendError naming the extra to install when MLX is missing or older than OLDEST_MLX."""
    wanted = f"MLX {'.'.join(map(str, OLDEST_MLX))} or newer: pip install 'edge0[mlx]'"
    if find_spec("mlx") is None:
        raise BackendError(f"the mlx backend needs {wanted}")
    found = version("mlx")
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST_MLX:
        raise BackendError(f"MLX {found} is installed; the mlx backend needs {wanted}")


check_mlx()
