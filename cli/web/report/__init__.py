"""adapter.html: a finished run on one page, which needs nothing but a browser.

series    columns of numbers for the charts, from the records of the run
run_page  the page, of a template, a style sheet and a script that lie beside it
"""

FIRST_WORDS = "<!doctype html><!-- Written by pyggml-finetune -->"
