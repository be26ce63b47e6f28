"""The table that says which tests hold the op's contract to its word: ``python tests/statements.py`` writes it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests/unit/fused_op"
PAGE = ROOT / "docs/statements.md"
LAST = 118
GROUPS = {
    1: "Module and class",
    14: "Ladder",
    41: "Out of tree",
    52: "Explicit backend",
    61: "Forced selector",
    71: "Choices kept, and asked per call",
    85: "torch.compile",
    98: "Trace",
    106: "Registry",
    115: "Older name",
}
_HEAD = """# What an op promises

`opgraft.BaseFusedOp` is specified as numbered statements. Each has at least one test, whose name carries the
number and reads as the statement; `test_014_to_019_...` counts for all of them. All of it runs without an
accelerator: a detector that says what it is told stands in for hardware, and the pretend device of the example
plugin for a second device type.

This page is written by `python tests/statements.py` and checked by a test.
"""


def tests_by_statement() -> dict[int, list[tuple[str, str]]]:
    """Give for each statement the tests whose names carry its number: (module, sentence)."""
    found: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
    for path in sorted(FOLDER.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            name = node.name if isinstance(node, ast.FunctionDef) else ""
            match = re.match(r"test_(\d{3}(?:_(?:to_)?\d{3})*)_(.*)", name)
            if match:
                numbers = [int(number) for number in re.findall(r"\d{3}", match[1])]
                if "_to_" in match[1]:
                    numbers = [*range(numbers[0], numbers[-1] + 1)]
                for number in numbers:
                    found[number].append((path.name, match[2].replace("_", " ")))
    return found


def page() -> str:
    """Write the page."""
    lines = [_HEAD]
    found = tests_by_statement()
    for number in range(1, LAST + 1):
        if number in GROUPS:
            lines += [f"\n## {GROUPS[number]}\n", "| | test | module |", "|---|---|---|"]
        for place, (module, sentence) in enumerate(found[number]):
            lines.append(f"| {number if place == 0 else ''} | {sentence} | `{module}` |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
