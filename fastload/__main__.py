"""``python -m fastload``."""

from fastload.cli import main

main()
