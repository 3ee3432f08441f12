"""The feed-forward layer and its gated forms."""
