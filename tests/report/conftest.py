"""One whole run and its page, for all tests of the report."""

import pytest

from tests.report.synthetic import STEPS, make_run, report


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """The folder of a finished run with dev and test evaluations, groups, judgements and the page."""
    folder = make_run(tmp_path_factory.mktemp("runs") / "demo", steps=STEPS, every=20)
    report(folder)
    return folder


@pytest.fixture(scope="session")
def page(run):
    """Its page, parsed."""
    return report(run)
