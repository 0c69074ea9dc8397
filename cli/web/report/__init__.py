"""adapter.html: a finished run on one page, which needs nothing but a browser.

series    columns of numbers for the charts, from the records of the run
run_page  the page, of a template, a style sheet and a script that lie beside it
"""

from pyggml.cli.terminal.kinds import written_kind

FIRST_WORDS = "<!doctype html><!-- Written by pyggml-finetune -->"
REPORT = written_kind("a report of pyggml-finetune", FIRST_WORDS)
