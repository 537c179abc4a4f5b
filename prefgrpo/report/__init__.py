"""report.html of a run folder.

Invariant: everything shown was measured and is stored in the run folder.
"""

from prefgrpo.report.page import write_report

__all__ = ["write_report"]
