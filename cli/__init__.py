"""The command line.

commands/  one file or folder for each command
terminal/  what they share at a terminal: options, help, progress, exits
web/       what the servers and the pages share
compile_ahead  a helper process that compiles for a run
demo/      what `finetune --demo` trains, on what
"""
