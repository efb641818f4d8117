"""Say why lab tests were skipped, whatever the report options."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = {str(r.longrepr[2]) for r in skipped if "tests/lab/" in r.nodeid}
    for reason in sorted(reasons):
        terminalreporter.write_line(f"LAB TESTS SKIPPED: {reason}", yellow=True, bold=True)
