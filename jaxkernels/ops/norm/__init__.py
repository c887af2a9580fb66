"""RMS norm and layer norm, with an optional residual that is added first."""
