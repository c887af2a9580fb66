"""Models and papers whose shapes the suites of several operations take."""

from __future__ import annotations

__all__ = ["LLAMA_3", "LLAMA_3_PAPER"]

#: width, hidden width of the feed-forward block, query heads, key/value heads, vocabulary; heads have 128 dimensions.
LLAMA_3 = {"8B": (4096, 14336, 32, 8, 128256), "70B": (8192, 28672, 64, 8, 128256)}
LLAMA_3_PAPER = "Grattafiori et al. 2024, arXiv:2407.21783, table 3"
