"""Views, copies, cuts, rows and order."""
