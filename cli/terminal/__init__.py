"""What commands have in common at a terminal.

exit       runs a command; what ends it → an exit code and a sentence
options    options that commands share, or that are made of a dataclass of settings
help       `--help` in groups
hints      command lines that a sentence tells to try
hub        names of the hub where a command takes a path
interrupt  Ctrl-C and other signals: an end after the step under way
show       numbers, names and rows for a reader
words      a text whose pieces are coloured by a level
paths      whether an output can be written
progress   a run's figures, as a bar or as lines
generation options of commands that write text, and tokens with their probabilities
placing    what is done about a model that is larger than its card
samples    answers without and with an adapter
rewriting  a model that is written again: a line a tensor, and the sizes
"""
