"""The body: every Ray actor of the training path, and what they need to talk to each other."""
