"""The declarations of weight types, a family of them in a file."""
