"""Attention in Pallas: one file for each design, and the parts that they share."""
