"""Settings every test runs under."""

import gc
import signal
from collections.abc import Iterator

import chromium
import processes
import pytest
import registered_kinds
import short_runs
import torch
from examples import SHARE, choose_few, up_to
from hypothesis import settings

# A shared machine may stop for a second at any moment: no example is wrong for being slow. What make test draws is
# the same every time, so that it is not red by chance; make examples draws anew.
settings.register_profile("tests", deadline=None, max_examples=up_to(100), derandomize=SHARE > 1)
settings.load_profile("tests")

collect_ignore = ["extension_package"]  # which a test installs

# Tests send Ctrl-C, which a shell has its background jobs ignore.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tensors here are tiny: a second thread only waits for the first. `make numerics` has two, and no oneDNN.
processes.set_numerics()


def pytest_configure(config: pytest.Config) -> None:
    """Let examples in docs and docstrings have the fixtures of all tests."""
    gc.disable()  # until all is imported, of which nothing becomes garbage
    config.pluginmanager.register(registered_kinds)
    config.pluginmanager.register(short_runs)


@pytest.fixture(autouse=True)
def _same_kernels() -> Iterator[None]:
    """Let every test have the kernels a new process has.

    Where a processor has no bfloat16, torch on ARM gives oneDNN up for good at the first product of such numbers, and
    all that comes after is summed in another order.
    """
    yield
    torch.backends.mkldnn.set_flags(processes.ONEDNN)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to the long suites what `few` and the browser's tests have beyond what make test tries."""
    matrices: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("long"):
            matrices.setdefault((item.location[0], item.location[2].partition("[")[0]), []).append(item)
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("slow" if item.get_closest_marker("smoke") else "long")
    for cases in matrices.values():
        few = choose_few([case.callspec.indices for case in cases], cases[0].get_closest_marker("few").args[0])
        for number, case in enumerate(cases):
            if number not in few:
                case.add_marker("long")


def pytest_collection_finish() -> None:
    """Let garbage collection pass over what was imported, which stays."""
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say once, and loudly, that the page was not tested in a browser."""
    skipped = [one for one in terminalreporter.stats.get("skipped", []) if chromium.MISSING in str(one.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests skipped. {chromium.MISSING}", red=True, bold=True)
