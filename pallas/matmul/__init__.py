"""Products in Pallas."""
