"""Attention in Pallas, one file a kernel."""
