"""Triton kernels: one file per op of `eagle4.ops`, same stem, same names. Imported on use only."""
