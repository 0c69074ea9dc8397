"""Documents → windows → batches."""
