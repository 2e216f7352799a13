"""The host's side of the guest agent: frames, archives, and the client that speaks with one guest."""
