"""Rows → tokens, and which of them are learned → documents, kept for later runs."""
