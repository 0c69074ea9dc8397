"""Graphs and plans as pictures: SVG and HTML that need no other program and no network.

picture    of a graph: every node of a small one, else its overview
every      the nodes and leaves of a graph of a few dozen
overview   sections of a graph, equal blocks folded
inside     the nodes of a section
constants  the numbers that an op was built with, in words
lanes      a plan: which tensor lies where in the arena, when
page       overview, inside and lanes as one page
heat       the gradient overview: layers by modules, at one step or over steps
tokens     a text with the loss of every token as its colour: a fragment of HTML
"""

from pyggml.look.draw.fold import Section, sections
from pyggml.look.draw.graph import constants, every, inside, overview, picture
from pyggml.look.draw.heat import heat_map, heat_steps, kinds_of
from pyggml.look.draw.lanes import lanes
from pyggml.look.draw.page import page

__all__ = [
    "Section", "constants", "every", "heat_map", "heat_steps", "inside", "kinds_of", "lanes",
    "overview", "page", "picture", "sections",
]  # fmt: skip
