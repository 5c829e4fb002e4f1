"""What every room may use: errors, registry, clock, ids, random keys. No torch, no Ray."""
