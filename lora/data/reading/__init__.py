"""Sources as they are given → files → rows."""
