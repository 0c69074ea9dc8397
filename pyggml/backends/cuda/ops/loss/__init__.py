"""Losses of rows of logits; the output layer and the loss in one."""
