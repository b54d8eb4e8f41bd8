"""Write the page to stdout and the progress to stderr. The exit code is 1 if something failed."""

import sys

from mptify.tools.compatibility import State, cells_in, check_family, page
from mptify.tools.compatibility.families import FAMILIES

names = sys.argv[1:] or list(FAMILIES)
table = {}
for name in names:
    table[name] = check_family(name)
    sys.stderr.write(f"[{len(table)}/{len(names)}] {name}\n")
    for _, bits, behaviour, cell in cells_in({name: table[name]}, State.FAILED):
        sys.stderr.write(f"    {bits} {behaviour}: {cell.reason}\n")
sys.stdout.write(page(table))
sys.exit(any(cells_in(table, State.FAILED)))
