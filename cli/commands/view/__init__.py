"""`pyggml view`: a model, its graph, its memory plan and its runs, in a browser on this machine.

command   the options
startup   starts the server, and stops it
app       the routes
queries   the fields of a request → checked settings
worker    one thread for what takes long; it ends with the request that wants it
source    the model file, and the model that is made of it
weights   a tensor of the file: its numbers in a histogram, and its update by a run
pictures  graphs on their way through the passes, and plans, drawn and searched
net       a net that is small enough to be looked at whole
backward  one backward pass, node by node
runs      a folder of runs: what they wrote so far
reading   a text as the model reads it: losses of its tokens, attention
activations  what its activations tell: heads, the logit lens, attribution, patches
browser_page  the page, of the files in web/: one module of JavaScript for each view
"""

from pyggml.cli.commands.view.command import command

__all__ = ["command"]
