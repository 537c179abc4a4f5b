"""report.html of a run folder. Invariant: everything shown was measured and lies in the folder."""

from prefgrpo.report.page import write_report

__all__ = ["write_report"]
