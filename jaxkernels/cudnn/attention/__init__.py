"""Attention by cuDNN."""
