"""`mptify report`: a run or a ticket file as one HTML page that needs nothing else.

findings what there is → judging which classes are taken for which → overview, classes, inside the sections → writing the page.
markup, charts and pictures are what sections are made of.
"""

from mptify.report.page import write_report

__all__ = ["write_report"]
