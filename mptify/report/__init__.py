"""`mptify report`: a run or a ticket file as one HTML page that loads nothing.

`collect` reads the run, `confusion` evaluates its network, and `overview`, `layers` and
`commands` compute what the sections show. `templates/` holds the HTML. `charts` and
`surgery_drawing` compute drawings from the shapes in `svg`.
"""

from mptify.report.page import write_report

__all__ = ["write_report"]
