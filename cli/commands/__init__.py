"""The commands, one file or folder each: it parses, calls and prints, and holds no formula."""
