"""Candidates -> packed trees: which tree to grow for a given width, and where it is grown."""

from __future__ import annotations


class TreePlanner:
    pass
