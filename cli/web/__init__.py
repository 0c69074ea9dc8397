"""What the servers on this machine, `serve` and `view`, have in common.

listening   a socket, and the packages that a server needs
server      runs an application until a signal comes
files       the parts of a page, sent with headers that bind browsers
"""
