"""Pictures as SVG, by hand: rectangles, lines and words."""

from pathlib import Path
from xml.etree import ElementTree

from edge0_ref.app.output_files import write_text

FONT = "system-ui, sans-serif"
INK, PALE = "#222222", "#cccccc"
COMPUTE, EXPERTS, WAIT, READ, LIMIT = "#7ea6d9", "#2f5d9b", "#d1495b", "#66a182", "#edae49"


class Picture:
    """[ENG-077] A well-formed SVG; lengths in pixels, y downwards."""

    def __init__(self, width: float, height: float) -> None:
        size = {"width": f"{width:g}", "height": f"{height:g}", "viewBox": f"0 0 {width:g} {height:g}"}
        self._root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "font-family": FONT, **size})
        self.rectangle(0.0, 0.0, width, height, "white")

    def rectangle(self, x: float, y: float, width: float, height: float, color: str, title: str = "") -> None:
        """A `title` is shown while the pointer is over it."""
        place = {"x": f"{x:.2f}", "y": f"{y:.2f}", "width": f"{width:.2f}", "height": f"{height:.2f}"}
        made = ElementTree.SubElement(self._root, "rect", {**place, "fill": color})
        if title:
            ElementTree.SubElement(made, "title").text = title

    def line(self, x1: float, y1: float, x2: float, y2: float, color: str = PALE, width: float = 1) -> None:
        ends = {"x1": f"{x1:.2f}", "y1": f"{y1:.2f}", "x2": f"{x2:.2f}", "y2": f"{y2:.2f}"}
        ElementTree.SubElement(self._root, "line", {**ends, "stroke": color, "stroke-width": f"{width:g}"})

    def text(self, x: float, y: float, words: str, size: float = 12, anchor: str = "start") -> None:
        place = {"x": f"{x:.2f}", "y": f"{y:.2f}", "font-size": f"{size:g}", "text-anchor": anchor, "fill": INK}
        ElementTree.SubElement(self._root, "text", place).text = words

    def legend(self, x: float, y: float, entries: list[tuple[str, str]]) -> None:
        """(color, words) from left to right."""
        for color, words in entries:
            self.rectangle(x, y - 9, 10, 10, color)
            self.text(x + 14, y, words)
            x += 30 + 6.5 * len(words)

    def write(self, path: Path) -> None:
        """Raises UsageError where that cannot be."""
        ElementTree.indent(self._root)
        write_text(path, ElementTree.tostring(self._root, "unicode") + "\n")
