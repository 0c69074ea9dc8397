"""The formats of files, one a module, each a stream of what stands in a file; see `files`."""
