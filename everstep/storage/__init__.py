"""Bytes, keys, commits: the object store, the objects in it and the log they form. No torch, no Ray."""
