"""Let this interpreter's environment reach all that another one holds.

Run by the interpreter that shall reach, with the other interpreter as its argument. What is
installed here comes first; editable installs of the other environment are reached too.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

PTH = "reached_environment.pth"


def main() -> None:
    """Write the one line that Python reads at start-up."""
    other = subprocess.run(
        [sys.argv[1], "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    pth = Path(sysconfig.get_path("purelib"), PTH)
    pth.write_text(f"import site; site.addsitedir({other!r})\n", encoding="utf-8")


if __name__ == "__main__":
    main()
