"""The projection of a transformer's stream to queries, keys and values, with rotary positions."""
