"""An operation in one folder: `scale_rows(x, s)` multiplies each row of a matrix by a number."""
