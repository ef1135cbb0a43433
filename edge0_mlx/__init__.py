"""edge0 on MLX: not written yet.

This package will hold the twins of the reference's maths files and register a backend named `mlx`. Until it does it
claims nothing: `edge0 generate --backend mlx` says that no such backend is installed.
"""
