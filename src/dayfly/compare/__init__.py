"""Two agent versions side by side: which tasks can be compared, and what changed."""
