"""A record, which is a dict of a file's names, → a row, by the names that it has.

shape       the parts that make a row, and the cells of a record by part
asking      what a record asks: a text, or messages with a system text and earlier rounds
training    rows that are learned
preferences rows whose answers are compared
questions   rows with choices, one of them right
prompts     rows to which answers are sampled
schema      which of all these a record is; nothing that it has to say is lost
columns     a guess at the columns of records with other names
names       what columns are called, and what each name means
rows        what a record is for training

A column of a name that `names` knows is read, or is empty, or repeats what is read; else the row is
refused. Others are named once in a line, `not read`.
"""

from pyggml.lora.data.records.schema import SHAPES, TRAINING, Schema, schema_of

__all__ = ["SHAPES", "TRAINING", "Schema", "schema_of"]
