"""What every operation stands on: the primitive, dispatch, sharding, checks of arguments, hardware."""
