"""One `Bench` a session; results are written when it ends."""

import pytest
from harness import Bench


@pytest.fixture(scope="session")
def bench(request):
    """Shapes, references and results; writes bench/results/<operation>.<cpu|gpu>.json."""
    bench = Bench()
    yield bench
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    for path in bench.write():
        if reporter:
            reporter.write_line(f"wrote {path}")
