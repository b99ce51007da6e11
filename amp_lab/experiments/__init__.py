"""The numbers behind the figures, one module a lesson: pure functions, no plotting."""
