"""Summary of the comparison with transformers."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report how many completions were compared with transformers', and list those that differ by a tie."""
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    found = [dict(report.user_properties) for report in reports]
    ties = [tie for properties in found for tie in properties.get("ties", [])]
    if texts := sum(properties.get("texts", 0) for properties in found):
        terminalreporter.write_line(f"{texts} completions compared with transformers', {len(ties)} ties")
    for tie in ties:
        terminalreporter.write_line(tie)
