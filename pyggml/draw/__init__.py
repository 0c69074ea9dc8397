"""Graphs and plans as pictures: SVG and HTML that need no other program and no network.

overview   sections of a graph, equal blocks folded
inside     the nodes of a section
lanes      a plan: which tensor lies where in the arena, when
page       all three as one page
"""

from pyggml.draw.fold import Section, sections
from pyggml.draw.graph import inside, overview
from pyggml.draw.lanes import lanes
from pyggml.draw.page import page

__all__ = ["Section", "inside", "lanes", "overview", "page", "sections"]
