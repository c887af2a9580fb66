"""The cross entropy of a linear layer's logits, computed without storing all logits."""
