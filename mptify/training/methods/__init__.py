"""Search methods. Importing this package registers the built-in ones by their names."""

from mptify.training.methods import biprop, dense, edgepopup
from mptify.training.methods.base import SearchMethod

__all__ = ["SearchMethod", "biprop", "dense", "edgepopup"]
