"""Attention: `dot_product_attention`."""
