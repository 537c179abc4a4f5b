"""report.html of a run folder, and a page that compares several runs.

Invariant: everything shown was measured and is stored in the run folder.
"""

from prefgrpo.report.compare import write_comparison
from prefgrpo.report.page import write_report

__all__ = ["write_comparison", "write_report"]
