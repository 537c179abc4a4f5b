"""What a run folder shows: report.html for a reader, and one picture for a README.

Invariant: everything shown was measured and lies in the folder; what was never logged is left out.
"""

from prefgrpo.report.page import write_report
from prefgrpo.report.strip import write_strip

__all__ = ["write_report", "write_strip"]
