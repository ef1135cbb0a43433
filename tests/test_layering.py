"""Who may import whom, read from the source: reading order is import order, and rings point inwards."""

import ast
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import edge0_ref

ROOT = Path(__file__).parents[1]
ORDER = edge0_ref.READING_ORDER
RINGS = {
    "words": ORDER[: ORDER.index("bits")],
    "bytes": ORDER[ORDER.index("bits") : ORDER.index("kernels")],
    "maths": ORDER[ORDER.index("kernels") : ORDER.index("engine")],
    "drive": ("engine",),
    "app": ("app", "__main__"),
}
WORDS_AND_BYTES = {*RINGS["words"], *RINGS["bytes"]}
PACKAGES = ("edge0_ref", "edge0_mlx", "conformance")
BACKENDS = {"mlx", "reference", "numba"}


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def chapter(path: Path) -> str:
    """The entry of READING_ORDER a file of edge0_ref belongs to."""
    first = path.relative_to(ROOT / "edge0_ref").parts[0]
    return first.removesuffix(".py")


CHAPTERS = [path for path in sources("edge0_ref") if path != ROOT / "edge0_ref" / "__init__.py"]


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def imports(node: ast.AST, everywhere: bool = True) -> Iterator[str]:
    """Dotted names of what is imported; `everywhere`: inside functions too. Never what only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                assert level == 0, f"line {child.lineno}: a relative import"
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if not everywhere:
                pass
            case _:
                yield from imports(child, everywhere)


def chapters_of_ref(path: Path, everywhere: bool = True) -> set[str]:
    names = imports(tree_of(path), everywhere)
    return {name.split(".")[1] for name in names if name.startswith("edge0_ref.")} & set(ORDER)


def offenders(paths: Iterable[Path], look: Callable[[Path], Iterable[object]]) -> dict[str, list[object]]:
    """File -> what is wrong in it."""
    found = {str(path.relative_to(ROOT)): list(look(path)) for path in paths}
    return {name: wrong for name, wrong in found.items() if wrong}


def test_reading_order_is_import_order() -> None:
    def later(path: Path) -> list[str]:
        here = ORDER.index(chapter(path))
        return [name for name in chapters_of_ref(path, everywhere=False) if ORDER.index(name) > here]

    assert not offenders(CHAPTERS, later)
    assert not list(imports(tree_of(ROOT / "edge0_ref" / "__init__.py")))


def test_reading_order_names_every_chapter_once() -> None:
    assert sorted(ORDER) == sorted({chapter(path) for path in CHAPTERS})


def test_rings_point_inwards() -> None:
    """Imports inside functions count: they put off an import, not a dependency."""
    ring = {name: number for number, names in enumerate(RINGS.values()) for name in names}
    assert not offenders(
        CHAPTERS, lambda path: [name for name in chapters_of_ref(path) if ring[name] > ring[chapter(path)]]
    )


def test_the_engine_imports_words_and_bytes_only() -> None:
    assert not offenders(sources("edge0_ref/engine"), lambda path: chapters_of_ref(path) - WORDS_AND_BYTES - {"engine"})


def test_commands_reach_the_maths_through_a_backend_found_by_name_only() -> None:
    allowed = WORDS_AND_BYTES | {"engine", "app"}
    assert not offenders(sources("edge0_ref/app"), lambda path: chapters_of_ref(path) - allowed)


def test_another_backend_shares_words_and_bytes_only() -> None:
    assert not offenders(sources("edge0_mlx"), lambda path: chapters_of_ref(path) - WORDS_AND_BYTES)


def test_oracles_share_no_code_with_what_they_judge() -> None:
    oracles = [path for path in sources("conformance") if "oracle" in path.stem or path.stem == "residency_model"]
    assert oracles
    assert not offenders(oracles, lambda path: chapters_of_ref(path) - {*RINGS["words"]})


def test_the_reference_knows_no_other_package_of_this_repository() -> None:
    others = {"edge0_mlx", "conformance", "tests", "mlx"}
    assert not offenders(CHAPTERS, lambda path: {name.split(".")[0] for name in imports(tree_of(path))} & others)


def test_environment_variables_are_read_by_command_lines_only() -> None:
    def reads(path: Path) -> Iterator[str]:
        for node in ast.walk(tree_of(path)):
            match node:
                case ast.Attribute(attr="environ" | "environb" | "getenv") | ast.Name(id="environ" | "getenv"):
                    yield f"line {node.lineno}"

    allowed = {ROOT / "edge0_ref" / "app" / "cli.py", ROOT / "conformance" / "__main__.py"}
    assert not offenders([path for path in sources(*PACKAGES) if path not in allowed], reads)


def test_no_shared_code_asks_which_backend_it_has() -> None:
    def compared(path: Path) -> Iterator[str]:
        for node in ast.walk(tree_of(path)):
            match node:
                case ast.Compare(left=left, comparators=others):
                    parts = [part for side in (left, *others) for part in ast.walk(side)]
                case ast.MatchValue(value=value):
                    parts = [value]
                case _:
                    continue
            if any(isinstance(part, ast.Constant) and part.value in BACKENDS for part in parts):
                yield f"line {node.lineno}"

    assert not offenders(CHAPTERS, compared)


def test_no_module_keeps_state() -> None:
    def declared(path: Path) -> Iterator[str]:
        return (name for node in ast.walk(tree_of(path)) if isinstance(node, ast.Global) for name in node.names)

    assert not offenders(sources(*PACKAGES), declared)
