"""Figures from numbers, one module a lesson: no computation, no widgets."""
