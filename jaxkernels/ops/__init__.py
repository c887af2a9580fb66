"""The operations: a JAX primitive with its rules, and the public function that validates and binds it."""
