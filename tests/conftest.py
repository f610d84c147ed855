"""Of a test that needs an open question of the exercises, pytest says which, and no more."""

import os
import re
import traceback

import pytest

OPEN = re.compile(r"NotImplementedError: (Q[\dA-Z]\.\d)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and "CHAPTERS" in os.environ:
        trace = "".join(traceback.format_exception(call.excinfo.value))
        if question := OPEN.search(trace):
            path, line, _ = item.location
            report.outcome = "skipped"
            report.longrepr = path, line + 1, f"{question[1]} not started"
    return report
