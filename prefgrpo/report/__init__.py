"""report.html of a run folder: everything on it was measured and is stored in the folder."""

from prefgrpo.report.page import write_report

__all__ = ["write_report"]
