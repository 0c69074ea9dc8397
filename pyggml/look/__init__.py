"""Questions to a model and pictures of it: lens, gradients, checks, drawings, limits."""
