"""Numbers moved: copies, rows by their numbers, orders; and what positions make."""
