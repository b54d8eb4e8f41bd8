"""Compatibility with timm: its behaviours, tried on tickets of one network per family.

`python -m mptify.tools.compatibility > docs/compatibility.md` writes the page of the docs. Names of
families after the command restrict it to these.
"""

from mptify.tools.compatibility.behaviours import BEHAVIOURS
from mptify.tools.compatibility.checking import Cell, State, check_family
from mptify.tools.compatibility.page import cells_in, page, row

__all__ = ["BEHAVIOURS", "Cell", "State", "cells_in", "check_family", "page", "row"]
