"""The brain: settings, states, policies, the controller. No Ray; only `training` below it knows torch."""
