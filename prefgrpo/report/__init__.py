"""report.html of a run folder, and one page about several.

Invariant: everything shown was measured and lies in the folder.
"""

from prefgrpo.report.compare import write_comparison
from prefgrpo.report.page import write_report

__all__ = ["write_comparison", "write_report"]
