"""What the servers on this machine, `serve` and `view`, and pages in files have in common.

listening   a socket, and the packages that a server needs
connections how long each phase of a connection lasts, and who makes room
server      runs an application until a signal comes
guard       who may call: hosts, origins, keys
body        requests' bodies → what is made of their JSON, within bounds
errors      faults → the API's error objects
files       the parts of a page, sent with headers that bind browsers
pages       pages that are one file and need no network
report/     the page of a run
"""
