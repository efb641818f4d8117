"""The programs on the pages of the integrations."""

from __future__ import annotations

import re
from pathlib import Path

_PAGES = Path(__file__).resolve().parents[2] / "docs" / "integrations"


def run_program(page: str) -> None:
    """Runs the last program on a page, as one of the ranks it is started on, in the working directory."""
    text = (_PAGES / page).read_text()
    *_, program = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    exec(compile(program, f"docs/integrations/{page}", "exec"), {"__name__": "__main__"})
