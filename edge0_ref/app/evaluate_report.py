"""What `edge0 eval` found, as tables for people and as a picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge0_ref.app.picture import COMPUTE, EXPERTS, LIMIT, PALE, READ, Picture
from edge0_ref.app.report import open_console

PAPER = (  # average of five benchmarks: teacher in 16 bits, edge0 with heads and LoRA
    ("35b", 83.2, 79.2),
    ("8b", 72.7, 69.9),
)
PAPER_MERGED = 0.18
GUESSES = (("heads", EXPERTS), ("same_as_last_token", COMPUTE), ("next_router_here", READ), ("most_frequent", LIMIT))


def draw_recall(recall: Mapping[int, Mapping[str, float]], path: Path) -> None:
    """A group of bars for each consumer: the heads, and every baseline."""
    bar, height, left, top = 14.0, 200.0, 50.0, 50.0
    group = bar * (len(GUESSES) + 1)
    picture = Picture(left + group * len(recall) + 20, top + height + 50)
    picture.text(left, 20.0, "share of the next token's experts that are named in advance")
    picture.legend(left, 38.0, [(color, name.replace("_", " ")) for name, color in GUESSES])
    for percent in range(0, 101, 20):
        y = top + height * (1 - percent / 100)
        picture.line(left, y, left + group * len(recall), y, PALE)
        picture.text(left - 6, y + 4, f"{percent} %", anchor="end")
    for number, (consumer, shares) in enumerate(recall.items()):
        for place, (name, color) in enumerate(GUESSES):
            x, tall = left + number * group + (place + 0.5) * bar, height * shares[name]
            picture.rectangle(x, top + height - tall, bar - 2, tall, color, f"{name}: {shares[name]:.1%}")
        picture.text(left + (number + 0.5) * group, top + height + 18, f"layer {consumer}", anchor="middle")
    picture.write(path)


def print_tables(told: Mapping[str, Any], paper: bool) -> None:
    from rich.table import Table

    console = open_console()
    table = Table(
        "variant", "bits/byte", "top-1 as teacher", "recovered", title="quality, decode mode", title_justify="left"
    )
    for name, bits in told["bits_per_byte"].items():
        stage = name[8:-1] if name.startswith("+ LoRA") else ""
        share = told["recovered"].get(stage)
        same = told["agreement"].get(name)
        table.add_row(
            name, f"{bits:.4f}", "" if same is None else f"{same:.1%}", "" if share is None else f"{share:.1%}"
        )
    console.print(table)
    if told["recall"]:
        table = Table("consumer", *next(iter(told["recall"].values())), title="recall of the next token's experts")
        for consumer, row in told["recall"].items():
            table.add_row(str(consumer), *(f"{value:.1%}" for value in row.values()))
        console.print(table)
    if told["merged_retention"] is not None:
        console.print(f"merged and quantised again, {told['merged_retention']:.1%} of the LoRA's effect is left")
    if paper:
        print_paper(console, told)


def print_paper(console: Any, told: Mapping[str, Any]) -> None:
    """The paper's benchmark averages beside what this text says: not the same measure, the same question."""
    from rich.table import Table

    table = Table("", "teacher", "int4, heads, LoRA", "kept", title="the paper's table and ours", title_justify="left")
    for name, teacher, ours in PAPER:
        table.add_row(f"paper, {name}: average of benchmarks", f"{teacher}", f"{ours}", f"{ours / teacher:.1%}")
    bits = told["bits_per_byte"]
    if "teacher" in bits:
        last = list(bits.values())[-1]
        table.add_row("here: bits per byte", f"{bits['teacher']:.4f}", f"{last:.4f}", f"{bits['teacher'] / last:.1%}")
    console.print(table)
    if told["merged_retention"] is not None:
        console.print(f"effect left after merging: paper {PAPER_MERGED:.0%}, here {told['merged_retention']:.1%}")
